"""`python -m tests.interop.vllm_suite.everything --python PYTHON [PART ...]`: all parts in turn, then one summary.

Each part has its limit in seconds, after which it and what it started are ended. Progress goes to stderr; what the
parts found (tables by file, failing tests with their reasons) is printed at the end. Exit status 0 if every part is as
it should be: no test fails on Blockyard but those that `known.py` names.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from typing import NamedTuple

from .known import CONNECTORS, LOADS


class Part(NamedTuple):
    """A command of this interpreter, `python -m ...`; limit: seconds, on a machine that does much else."""

    what: str
    limit: int
    command: tuple[str, ...]


SUITE, VLLM = "tests.interop.vllm_suite", "--python={python}"
PARTS = {
    "core": Part("vLLM's tests of its block manager and schedulers", 3000, (SUITE, VLLM)),
    "connectors": Part(
        "vLLM's tests of its KV connectors, level names", 1500, (SUITE, VLLM, "--level=names", *CONNECTORS)
    ),
    "loads": Part("those that need no block held by id, level tokens", 900, (SUITE, VLLM, *LOADS)),
    "ours": Part("our tests of vLLM's schedulers, and a server", 3000, (f"{SUITE}.ours", VLLM)),
    "cpu": Part(
        "our policies in vLLM's CPU tier, our tiers below it",
        900,
        (
            "pytest",
            "-q",
            "tests/interop/test_vllm_cpu_policy.py",
            "tests/interop/test_vllm_tier.py",
            "tests/integrations/test_vllm.py",
        ),
    ),
    "models": Part("generation with a real model; microseconds a step", 3600, (f"{SUITE}.models", VLLM)),
}


class Outcome(NamedTuple):
    """The result of a part."""

    said: str
    seconds: float
    status: int | None  # None: it was ended at its limit


def run(part: Part, python: str) -> Outcome:
    """Run one part; its progress is shown and its output kept."""
    command = [sys.executable, "-m", *[word.format(python=python) for word in part.command]]
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=None,
        env=os.environ | {"VLLM_PYTHON": python},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=part.limit)
        status: int | None = process.returncode
    except subprocess.TimeoutExpired:
        end(process)
        said, status = process.communicate()[0], None
    except BaseException:
        end(process)
        raise
    return Outcome(said, time.monotonic() - start, status)


def end(process: subprocess.Popen[str]) -> None:
    """End a process and all others in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def verdict(part: Part, outcome: Outcome) -> str:
    """Return the result in one word."""
    if outcome.status is None:
        return f"ended after {part.limit} s"
    return "as it should be" if outcome.status == 0 else f"WRONG (exit status {outcome.status})"


def summary(outcomes: dict[str, Outcome]) -> list[str]:
    """Return the failures of each part, and a table of all parts."""
    lines = []
    for name, outcome in outcomes.items():
        lines += [f"## {name}: {PARTS[name].what}", "", outcome.said.rstrip(), ""]
    lines += ["| part | what | seconds | result |", "|---|---|---|---|"]
    for name, outcome in outcomes.items():
        part = PARTS[name]
        lines.append(f"| {name} | {part.what} | {outcome.seconds:.0f} | {verdict(part, outcome)} |")
    return lines


def main() -> int:
    """Run the parts, print the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the interpreter that has vLLM")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    asked = parser.parse_args()
    unknown = sorted(set(asked.parts) - set(PARTS))
    if unknown:
        parser.error(f"PART is {unknown[0]!r}; it must be one of {', '.join(PARTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what a part started is ended too
    python, outcomes = os.path.abspath(asked.python), {}
    for name in asked.parts or PARTS:
        print(f"== {name}: {PARTS[name].what}", file=sys.stderr, flush=True)
        outcomes[name] = run(PARTS[name], python)
    print(*summary(outcomes), sep="\n")
    return int(any(outcome.status != 0 for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
