"""Compile the core with mypyc, or leave it interpreted when BLOCKYARD_COMPILE=0."""

import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
SOURCE = ROOT / "src"
IN_PLACE = "--inplace" in sys.argv
sys.path.insert(0, str(SOURCE / "blockyard"))
from _docstrings import documented_c  # noqa: E402
from _sources import compiled_sources, source_digest, write_build_record  # noqa: E402
from _weakrefs import with_weak_references  # noqa: E402


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
        module.sources = [
            str(documented_c(Path(p), names, with_weak_references)) if p in written else p for p in module.sources
        ]


def extensions() -> list:
    if os.environ.get("BLOCKYARD_COMPILE", "1") == "0":
        if IN_PLACE:
            remove_old_extensions()
        return []
    if os.name == "posix":
        require_compiler()
    from mypyc.build import mypycify

    sources = [str(path.relative_to(ROOT)) for path in compiled_sources(SOURCE / "blockyard")]
    os.chdir(ROOT)
    modules = mypycify(sources, opt_level="3", debug_level="0", group_name="blockyard")
    add_docstrings(modules, [Path(source) for source in sources])
    if os.name == "posix":
        # Lets the C compiler inline across functions of the one shared library: 3 to 5 % on the hot loops.
        for module in modules:
            module.extra_compile_args.append("-fno-semantic-interposition")
    return modules


ext_modules = extensions()
# An interpreted wheel built from a checkout leaves the checkout's own, compiled build as it is.
if ext_modules or IN_PLACE:
    write_build_record(SOURCE / "blockyard", source_digest(SOURCE / "blockyard") if ext_modules else "")
setup(ext_modules=ext_modules)
