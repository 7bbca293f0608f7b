"""Build the wheels that a package index takes, and test each where there is no compiler: `make wheels`.

    python -m tests.wheels [--output dist] [--extras lab] [PYTHON ...]

The sdist is made first and every wheel is built from it, so a file that it lacks is noticed, and so is one that a build
leaves behind. `auditwheel` gives a wheel its manylinux tag. Then each is installed in an environment of its own, with
nothing else on PATH: an import, a sequence's life, and the tests named by --tests, from the sdist (by default the twin
test).
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
INTERPRETERS = ("python3.11", "python3.12", "python3.13", "python3.14")
TEST_NEEDS = ("pytest>=8", "pytest-xdist>=3.5", "hypothesis>=6.100", "cbor2>=5.6", "xxhash>=3.4")
HAS_HEADERS = "import pathlib, sysconfig; assert (pathlib.Path(sysconfig.get_path('include')) / 'Python.h').exists()"
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


def make_sdist(output: Path, scratch: Path) -> Path:
    """Make the sdist; the folder into which it was unpacked."""
    run(sys.executable, "-m", "build", "--sdist", "--outdir", output, ROOT)
    sdist = max(output.glob("blockyard-*.tar.gz"), key=lambda path: path.stat().st_mtime)
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch, filter="data")
    return scratch / sdist.name.removesuffix(".tar.gz")


def make_wheel(python: str, source: Path, output: Path, scratch: Path) -> Path:
    """The wheel of one interpreter, with its manylinux tag."""
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


def try_wheel(python: str, wheel: str, source: Path, tests: list[str], scratch: Path) -> None:
    """Install it, maybe with extras, with nothing on PATH but its environment, and run it."""
    binaries = environment(python, scratch / "test", wheel, *TEST_NEEDS)
    alone = {"PATH": str(binaries), "HOME": str(scratch), "BLOCKYARD_SEED": os.environ.get("BLOCKYARD_SEED", "1")}
    run(binaries / "python", "-I", "-c", LIFE, env=alone, cwd=scratch)
    shutil.copytree(source, scratch / "source")
    run(binaries / "python", "-m", "pytest", "-q", *tests, env=alone, cwd=scratch / "source")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.wheels", description="Build and test wheels.")
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help=f"by default those of {', '.join(INTERPRETERS)}")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="where they go")
    parser.add_argument("--extras", default="", help="of the package, with commas, that the tests need")
    parser.add_argument("--tests", nargs="+", default=["tests/package/test_twin.py"], help="what each runs")
    options = parser.parse_args()
    pythons = usable(options.pythons or list(INTERPRETERS))
    if not pythons:
        parser.error("none of the interpreters can build an extension")
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="blockyard-wheels-") as name:
        source = make_sdist(options.output.resolve(), Path(name))
        for number, python in enumerate(pythons):
            scratch = Path(name) / str(number)
            scratch.mkdir()
            wheel = make_wheel(python, source, options.output.resolve(), scratch)
            wanted = f"{wheel}[{options.extras}]" if options.extras else str(wheel)
            try_wheel(python, wanted, source, options.tests, scratch)
            print(f"{wheel.name}: tested", flush=True)


if __name__ == "__main__":
    main()
