"""`python -m tests.interop.vllm_suite --python PYTHON`: vLLM's tests stock, then on Blockyard; a table by file.

PYTHON is an interpreter with vLLM and what its tests import. Exit status 1 if a test that passes with stock vLLM fails
on Blockyard and is not named in `known.py`, or if one that is named there passes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from blockyard_testing.outcomes import Outcomes, failures, outcomes_in, table, unexplained
from blockyard_testing.places import SOURCE_PATH
from blockyard_testing.stand_ins import STAND_INS

from .known import CORE, KNOWN, KNOWN_OF_CONNECTORS, LEFT_OUT
from .source import HERE, fetched_tests

SECONDS_A_TEST = 300


def run(
    python: str, folder: Path, hub: Path, plugins: list[str], level: str, selected: list[str]
) -> tuple[Outcomes, Counter[str]]:
    """One run: test → "passed", "failed" or "skipped"; and how many tests made which managers.

    folder: has vLLM's `tests`; where it has a `vllm` too, that is taken before the installed one.
    """
    with tempfile.TemporaryDirectory() as scratch:
        results, levels = Path(scratch) / "results.xml", Path(scratch) / "levels.json"
        if (folder / "vllm").is_dir():
            name_as_for_cpus(Path(scratch))
        command = [
            python,
            "-P",
            "-m",
            "pytest",
            "-q",
            "--import-mode=append",
            "-p",
            "no:cacheprovider",
            f"--timeout={SECONDS_A_TEST}",
            *[f"-p{name}" for name in plugins],
        ]
        # Not our settings, nor vLLM's tests/conftest.py, which imports its whole model zoo.
        command += [f"-c{os.devnull}", f"--rootdir={folder}", f"--confcutdir={folder / CORE}"]
        command += [*[f"--ignore={name}" for name in LEFT_OUT], f"--junitxml={results}", *(selected or [CORE])]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([scratch, str(folder), str(HERE / "on_path"), STAND_INS, SOURCE_PATH]),
            "HF_HUB_CACHE": str(hub),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "BLOCKYARD_LEVEL": level,
            "BLOCKYARD_LEVELS_FILE": str(levels),
        }
        subprocess.run(command, cwd=folder, env=environment, stdout=sys.stderr)
        made = json.loads(levels.read_text()) if levels.exists() else {}
        return outcomes_in(results), Counter(" and ".join(names) or "none" for names in made.values())


def name_as_for_cpus(folder: Path) -> None:
    """Metadata by which sources that nobody has built know that they run on a CPU."""
    metadata = folder / "vllm-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0+cpu\n")


def main() -> int:
    """Run both, print the table, the failures with their reasons, and what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the interpreter that has vLLM")
    parser.add_argument("--level", default="auto", choices=("auto", "names"), help="default: auto")
    parser.add_argument(
        "--vllm", type=Path, help="an unpacked source distribution of another vLLM: its tests, its Python"
    )
    parser.add_argument("--stock", type=Path, help="a JSON file: stock's outcomes are read from it, or kept there")
    parser.add_argument("tests", nargs="*", help="files of vLLM's, default: all of tests/v1/core")
    asked = parser.parse_args()
    python = os.path.abspath(asked.python)
    fetched = fetched_tests(python)
    folder, hub = (asked.vllm or fetched).resolve(), fetched / "hub"
    if asked.stock and asked.stock.exists():
        stock = json.loads(asked.stock.read_text())
    else:
        stock, _ = run(python, folder, hub, ["vllm_fixtures"], "", asked.tests)
        if asked.stock:
            asked.stock.write_text(json.dumps(stock))
    ours, levels = run(python, folder, hub, ["vllm_fixtures", "vllm_ours"], asked.level, asked.tests)
    print(*table(stock, ours), sep="\n")
    print(f"\nTests by the managers that they made: {dict(levels)}")
    known = KNOWN | KNOWN_OF_CONNECTORS
    print(*failures(stock, ours, known), sep="\n")
    wrong = unexplained(stock, ours, known)
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
