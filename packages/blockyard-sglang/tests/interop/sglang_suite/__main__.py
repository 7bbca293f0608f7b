"""`python -m tests.interop.sglang_suite --python PYTHON --sglang DIR`: SGLang's unit tests of its radix cache.

PYTHON is an interpreter with SGLang and pytest, DIR a checkout of SGLang's repository: its wheel has no tests, and no
source distribution of 0.5.23 is on the package index. The tests run stock, then with our cache in the place of
`RadixCache`. Exit status 1 if one that passes stock fails on Blockyard and is not named in `known.py`, or if one that
is named there passes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from blockyard_testing.outcomes import Outcomes, outcomes_in, table, unexplained
from blockyard_testing.places import SOURCE_PATH
from blockyard_testing.stand_ins import STAND_INS

from .known import FILE, KNOWN

HERE = Path(__file__).parent


def run(python: str, checkout: Path, plugins: list[str]) -> Outcomes:
    """One run: test → "passed", "failed" or "skipped"."""
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "results.xml"
        command = [python, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"-c{os.devnull}"]
        command += [f"--rootdir={checkout}", "--import-mode=importlib", f"--junitxml={results}"]
        command += [*[f"-p{name}" for name in plugins], FILE]
        paths = (HERE / "on_path", STAND_INS, SOURCE_PATH)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=checkout, env=environment, stdout=sys.stderr)
        return outcomes_in(results)


def main() -> int:
    """Run both, print the table, the failures with their reasons, and what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the interpreter that has SGLang")
    parser.add_argument("--sglang", required=True, type=Path, help="a checkout of SGLang's repository")
    asked = parser.parse_args()
    python, checkout = os.path.abspath(asked.python), asked.sglang.resolve()
    if not (checkout / FILE).exists():
        parser.error(f"--sglang is {asked.sglang}; it has no {FILE}")
    stock = run(python, checkout, ["sglang_before"])
    ours = run(python, checkout, ["sglang_before", "sglang_ours"])
    print(*table(stock, ours), sep="\n")
    for name, outcome in stock.items():
        if outcome == "failed":
            print(f"- {name} fails with stock SGLang here")
    for name, outcome in ours.items():
        if outcome == "failed" and stock.get(name) == "passed":
            print(f"- {name}: {KNOWN.get(name.rpartition('/')[2], 'NOT KNOWN')}")
    wrong = unexplained(stock, ours, KNOWN)
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
