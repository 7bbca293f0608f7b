"""Compile the core with mypyc, or leave it interpreted when BLOCKYARD_COMPILE=0.

An in-place build (`build_ext --inplace`, `pip install -e .`) keeps what it made in the checkout, so that the next one
is short. A wheel is built in a temporary directory and leaves the checkout as it was.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SOURCE = ROOT / "src"
IN_PLACE = "--inplace" in sys.argv
KEEPS = IN_PLACE or not {"develop", "editable_wheel", "sdist"}.isdisjoint(sys.argv)
# Asked for the metadata, which pip does twice before it builds, there is nothing to compile.
BUILDERS = {"bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"}
BUILDS = not BUILDERS.isdisjoint(sys.argv)

sys.dont_write_bytecode = True
sys.path.insert(0, str(SOURCE / "blockyard"))
from _generated_c import changed_c, documented_c  # noqa: E402
from _sources import MYPY_OPTIONS, compiled_sources, source_digest, write_build_record  # noqa: E402

sys.dont_write_bytecode = False


def remove_old_extensions() -> None:
    """An extension beside a source wins the import, so a leftover one would hide the interpreted build."""
    for pattern in ("*__mypyc.*.so", "blockyard/**/*.so"):
        for path in SOURCE.glob(pattern):
            path.unlink()


def require_compiler() -> None:
    """One sentence instead of a page of build output, where what is missing can be known in advance."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    header = Path(sysconfig.get_path("include")) / "Python.h"
    for missing, what in ((not shutil.which(compiler), f"C compiler ({compiler})"), (not header.exists(), f"{header}")):
        if missing:
            sys.exit(
                f"blockyard: there is no {what}; install gcc and the Python headers (Debian: gcc, python3-dev), "
                f"or build the slow interpreted version with BLOCKYARD_COMPILE=0"
            )


def add_docstrings(modules: list, sources: list[Path]) -> None:
    """Compile the copy with docstrings and room for weak references instead of mypyc's own C file."""
    names = {".".join(path.relative_to("src").with_suffix("").parts): path for path in sources}
    written = [path for module in modules for path in module.sources if Path(path).name == "__native_blockyard.c"]
    if len(written) != 1:
        sys.exit(f"blockyard: mypyc was expected to write one C file for all modules, not {len(written)}")
    for module in modules:
        module.sources = [str(documented_c(Path(p), names, changed_c)) if p in written else p for p in module.sources]


def extensions(scratch: Path) -> list:
    if os.environ.get("BLOCKYARD_COMPILE", "1") == "0":
        if IN_PLACE:
            remove_old_extensions()
        return []
    if not BUILDS:
        return []
    if os.name == "posix":
        require_compiler()
    from mypyc.build import mypycify

    sources = [str(path.relative_to(ROOT)) for path in compiled_sources(SOURCE / "blockyard")]
    os.chdir(ROOT)
    cache = ROOT / "build" if KEEPS else scratch
    target = None if KEEPS else str(scratch / "c")
    arguments = [*MYPY_OPTIONS, f"--cache-dir={cache / 'mypy'}", *sources]
    modules = mypycify(arguments, opt_level="3", debug_level="0", group_name="blockyard", target_dir=target)
    add_docstrings(modules, [Path(source) for source in sources])
    if os.name == "posix":
        # The first lets the C compiler inline across functions of the one shared library: 3 to 5 % on the hot loops.
        # The second saves two minutes: gcc looks for long at how C that nobody wrote by hand is indented.
        for module in modules:
            flags = ["-fno-semantic-interposition", "-Wno-misleading-indentation"]
            module.extra_compile_args = [*module.extra_compile_args, *flags]
        use_all_cores(modules)
    return modules


def use_all_cores(modules: list) -> None:
    """Have gcc compile the one large C file on every core: as link-time optimization, which it splits by itself."""
    compiler = [*shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"), "--version"]
    told = subprocess.run(compiler, capture_output=True, text=True, check=False).stdout
    if "Free Software Foundation" in told and (os.cpu_count() or 1) > 1:
        for module in modules:
            if any("__native_" in source for source in module.sources):
                module.extra_compile_args = [*module.extra_compile_args, "-flto"]
                module.extra_link_args = [*module.extra_link_args, f"-flto={os.cpu_count()}"]


class BuildExtension(build_ext):
    """An in-place build is on record when it is done, and not before: one that failed leaves the old record."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def run(self) -> None:
        super().run()
        if self.inplace:
            write_build_record(SOURCE / "blockyard", built_digest(self.extensions))


class BuildPython(build_py):
    """A wheel has a record of its own build, whatever the checkout's says."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            write_build_record(Path(self.build_lib) / "blockyard", built_digest(self.distribution.ext_modules))


def built_digest(modules: list | None) -> str:
    return source_digest(SOURCE / "blockyard") if modules else ""


def main(scratch: Path) -> None:
    modules = extensions(scratch)
    if IN_PLACE and not modules:
        write_build_record(SOURCE / "blockyard", "")
    places = {} if KEEPS else {"build": {"build_base": str(scratch)}, "egg_info": {"egg_base": str(scratch)}}
    setup(ext_modules=modules, cmdclass={"build_ext": BuildExtension, "build_py": BuildPython}, options=places)


with tempfile.TemporaryDirectory(prefix="blockyard-build-") as directory:
    main(Path(directory))
