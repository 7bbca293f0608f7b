"""Build what a package index takes, and test each wheel where there is no compiler: `make wheels`.

    python -m tests.wheels [--output dist] [PYTHON ...]

The core's sdist is made first, and each of its wheels is built from it, so a file that it lacks is noticed, and so is
one that a build leaves behind. `auditwheel` gives a wheel its manylinux tag. Then each is installed in an environment
of its own, with nothing else on PATH: an import, a sequence's life, and the tests named by --tests, from the sdist (by
default the twin test). The companions' wheels are pure: each is built, installed alone with the core's wheel and those
of the packages that it needs, and found.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / "packages"
INTERPRETERS = ("python3.11", "python3.12", "python3.13", "python3.14")
TEST_NEEDS = ("pytest>=8", "pytest-xdist>=3.5", "hypothesis>=6.100", "cbor2>=5.6", "xxhash>=3.4")
HAS_HEADERS = "import pathlib, sysconfig; assert (pathlib.Path(sysconfig.get_path('include')) / 'Python.h').exists()"
#: The companions, each after those that it needs, and the packages of this repository among its needs.
COMPANIONS = {
    "blockyard-tiers": (),
    "blockyard-lab": (),
    "blockyard-vllm": (),
    "blockyard-sglang": (),
    "blockyard-engine": ("blockyard-tiers",),
    "blockyard-serve": ("blockyard-tiers", "blockyard-engine"),
}
LIFE = """
import shutil
assert not any(map(shutil.which, ("cc", "gcc", "g++", "clang"))), "a compiler is on PATH"
import blockyard
assert blockyard.compiled(), "the wheel is interpreted"
cache = blockyard.KVCacheManager(blockyard.CacheConfig(num_blocks=100, block_size=4))
first = cache.allocate(range(10))
plan = cache.reserve([first])
cache.commit([first], plan.num_scheduled, [7])
branch, = cache.fork(first, 1)
second = cache.allocate(range(10))
assert cache.num_computed_tokens(second) == 8, cache.num_computed_tokens(second)
cache.free([first, branch, second])
cache.check()
assert cache.num_used_blocks == 0, cache.num_used_blocks
print("a sequence's life:", blockyard.__version__, blockyard._build.build_name())
"""


def usable(names: list[str]) -> list[str]:
    """Those interpreters that are here and can build an extension."""
    found = []
    for name in names:
        path = shutil.which(name)
        works = path and subprocess.run([path, "-c", HAS_HEADERS], capture_output=True).returncode == 0
        print(f"{name}: {path if works else 'not here, or without its headers: no wheel'}", flush=True)
        if path and works:
            found.append(path)
    return found


def run(*command: str | Path, **options: object) -> None:
    subprocess.run([str(part) for part in command], check=True, **options)  # type: ignore[call-overload]


def environment(python: str, folder: Path, *needs: str | Path) -> Path:
    """A new environment with these packages, none of them compiled here; its `bin`."""
    run(python, "-m", "venv", folder)
    run(folder / "bin" / "python", "-m", "pip", "install", "-q", "--only-binary", ":all:", *needs)
    return folder / "bin"


def copy_of(package: str, scratch: Path) -> Path:
    """A copy of a package without what builds left in it, so that a build here changes nothing in the checkout."""
    left_overs = shutil.ignore_patterns(
        "build", "*.egg-info", "*.so", "__pycache__", "_build_record.py", ".*_cache", ".hypothesis"
    )
    return Path(
        shutil.copytree(PACKAGES / package, scratch / "sources" / package, ignore=left_overs, dirs_exist_ok=True)
    )


def make_sdist(package: str, output: Path, scratch: Path) -> Path:
    """Make the sdist of a package; the folder into which it was unpacked."""
    run(sys.executable, "-m", "build", "--sdist", "--outdir", output, copy_of(package, scratch))
    sdist = max(output.glob(f"{package.replace('-', '_')}-[0-9]*.tar.gz"), key=lambda path: path.stat().st_mtime)
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch, filter="data")
    return scratch / sdist.name.removesuffix(".tar.gz")


def make_wheel(python: str, source: Path, output: Path, scratch: Path) -> Path:
    """The core's wheel for one interpreter, with its manylinux tag."""
    before = set(source.rglob("*"))
    run(python, "-m", "venv", scratch / "build")
    run(scratch / "build" / "bin" / "python", "-m", "pip", "wheel", "-q", "--no-deps", "-w", scratch / "raw", source)
    if left := set(source.rglob("*")) - before:
        sys.exit(f"the build left {len(left)} files in the source tree: {sorted(map(str, left))[:10]}")
    (raw,) = (scratch / "raw").glob("*.whl")
    tools = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    run(sys.executable, "-m", "auditwheel", "repair", "-w", scratch / "repaired", raw, env=tools)
    (wheel,) = (scratch / "repaired").glob("*.whl")
    return Path(shutil.move(wheel, output / wheel.name))


def try_wheel(python: str, wheel: Path, source: Path, tests: list[str], scratch: Path) -> None:
    """Install the core's wheel with nothing on PATH but its environment, and run it."""
    binaries = environment(python, scratch / "test", wheel, *TEST_NEEDS)
    alone = {"PATH": str(binaries), "HOME": str(scratch), "BLOCKYARD_SEED": os.environ.get("BLOCKYARD_SEED", "1")}
    run(binaries / "python", "-I", "-c", LIFE, env=alone, cwd=scratch)
    # Beside the sdist's tests stand what they share with other packages; the sources are the wheel's.
    folder = scratch / "checkout" / "packages" / "blockyard"
    shutil.copytree(source, folder)
    shutil.copytree(ROOT / "testing", scratch / "checkout" / "testing")
    with_testing = {**alone, "PYTHONPATH": str(scratch / "checkout" / "testing")}
    run(binaries / "python", "-m", "pytest", "-q", *tests, env=with_testing, cwd=folder)


def try_companion(python: str, package: str, wheels: dict[str, Path], scratch: Path) -> None:
    """Install a companion's wheel with those that it needs, without their needs from elsewhere, and import it."""
    folder = scratch / package
    folder.parent.mkdir(exist_ok=True)
    run(python, "-m", "venv", folder)
    ours = [wheels[name] for name in ("blockyard", *COMPANIONS[package], package)]
    run(folder / "bin" / "python", "-m", "pip", "install", "-q", "--no-deps", *ours)
    run(
        folder / "bin" / "python",
        "-m",
        "pip",
        "install",
        "-q",
        "numpy",
        "librt<0.17",
        "mypy-extensions",
        "xxhash",
        "cbor2",
    )
    name = package.replace("-", "_")
    program = f"import importlib.util as u, blockyard; assert blockyard.compiled(); assert u.find_spec({name!r})"
    run(folder / "bin" / "python", "-I", "-c", program, cwd=scratch)
    run(folder / "bin" / "blockyard", "--help", stdout=subprocess.DEVNULL, cwd=scratch)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.wheels", description="Build and test wheels.")
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help=f"by default those of {', '.join(INTERPRETERS)}")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="where they go")
    parser.add_argument("--tests", nargs="+", default=["tests/package/test_twin.py"], help="what each of the core runs")
    options = parser.parse_args()
    pythons = usable(options.pythons or list(INTERPRETERS))
    if not pythons:
        parser.error("none of the interpreters can build an extension")
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    wheels: dict[str, Path] = {}
    with tempfile.TemporaryDirectory(prefix="blockyard-wheels-") as name:
        source = make_sdist("blockyard", output, Path(name))
        for number, python in enumerate(pythons):
            scratch = Path(name) / str(number)
            scratch.mkdir()
            wheel = make_wheel(python, source, output, scratch)
            try_wheel(python, wheel, source, options.tests, scratch)
            wheels.setdefault("blockyard", wheel)
            print(f"{wheel.name}: tested", flush=True)
        for package in COMPANIONS:
            made = Path(name) / "pure" / package
            folder = make_sdist(package, output, Path(name))
            run(pythons[0], "-m", "pip", "wheel", "-q", "--no-deps", "-w", made, folder)
            (wheel,) = made.glob("*.whl")
            wheels[package] = Path(shutil.move(wheel, output / wheel.name))
            try_companion(pythons[0], package, wheels, Path(name) / "companions")
            print(f"{wheel.name}: installed alone", flush=True)


if __name__ == "__main__":
    main()
