"""What hands a decode step over, and whole steps made, sent and finished by Blockyard and by vLLM, in turns.

python -m benchmarks.steps_in_turns [--vllm-python FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blockyard.steps import PlanReceiver, PlanSender

from .measure import HEADERS, Figure, figure, print_markdown
from .steps import LENGTHS, NUM_SEQS, Decode, step_figures
from .workload import BLOCK_SIZE

ROOT = Path(__file__).parent.parent
#: Each of `BLOCK_SIZE` steps; the first does not count.
NUM_ROUNDS = 10
MAX_SECONDS = 600

Round = list[dict[str, float]]

#: What each part of a step is called.
OURS = {
    "reserve": "Blockyard: reserve, which makes the plan",
    "write": "Blockyard: plan to bytes",
    "read": "Blockyard: plan from bytes, checked",
    "commit": "Blockyard: commit",
    "bytes": "Blockyard: bytes of a plan",
}
THEIRS = {
    "schedule": "schedule, which makes the SchedulerOutput",
    "pickle": "SchedulerOutput pickled",
    "unpickle": "SchedulerOutput unpickled",
    "enqueue": "pickled into its MessageQueue",
    "dequeue": "unpickled from its MessageQueue",
    "update": "update_from_output",
    "bytes": "bytes of a SchedulerOutput",
}
#: Where it is not microseconds; how many of the unit one of a sample is.
UNITS = {"bytes": ("kB", 1e-3), "schedule": ("ms", 1e-6), "update": ("ms", 1e-6)}


class Ours:
    """Decode steps of one cache, each sent to a receiver in this process."""

    def __init__(self, num_tokens: int) -> None:
        self.decode = Decode(num_tokens)
        self.sender, self.receiver = PlanSender(self.decode.config), PlanReceiver(self.decode.config)

    def run_round(self) -> Round:
        return [self._run_step() for _ in range(BLOCK_SIZE)]

    def _run_step(self) -> dict[str, float]:
        decode, clock = self.decode, time.perf_counter_ns
        begin = clock()
        plan = decode.cache.reserve(decode.seqs, decode.ones)
        made = clock()
        message = self.sender.to_bytes(plan)
        written = clock()
        self.receiver.from_bytes(message)
        read = clock()
        decode.cache.commit(decode.seqs, decode.ones, decode.sampled)
        times = {"reserve": made - begin, "write": written - made, "read": read - written, "commit": clock() - read}
        return {**times, "bytes": len(message)}


@contextmanager
def vllm_worker(python: str) -> Iterator[tuple[str, Callable[[int], Round]]]:
    """vLLM's version, and what runs a round of its steps. It is ended after ten minutes at the latest."""
    command = [python, "-m", "benchmarks.peers.vllm_steps", str(NUM_SEQS), str(BLOCK_SIZE), *map(str, LENGTHS)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=environment) as process:
        assert process.stdin is not None
        stdin = process.stdin
        timer = threading.Timer(MAX_SECONDS, process.kill)
        timer.start()

        def run_round(num_tokens: int) -> Round:
            print(num_tokens, file=stdin, flush=True)
            steps: Round = next_answer(process)
            return steps

        try:
            yield next_answer(process)["version"], run_round
        except BaseException:
            process.kill()
            raise
        finally:
            timer.cancel()


def next_answer(process: subprocess.Popen[str]) -> Any:
    """The next line of JSON; vLLM's own messages begin otherwise."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(("{", "[")):
            return json.loads(line)
    raise SystemExit("vLLM's process ended early; what it said is above")


def figures_in_turns(python: str) -> Iterator[Figure]:
    """Rounds of both in turns, so that both meet the machine as it is."""
    with vllm_worker(python) as (version, run_round):
        for num_tokens in LENGTHS:
            ours = Ours(num_tokens)
            rounds = [(ours.run_round(), run_round(num_tokens)) for _ in range(NUM_ROUNDS)][1:]
            own, other = ([step for steps in side for step in steps] for side in zip(*rounds, strict=True))
            yield from _rows(OURS, own, num_tokens)
            yield from _rows({part: f"vLLM {version}: {what}" for part, what in THEIRS.items()}, other, num_tokens)


def _rows(names: dict[str, str], steps: Round, num_tokens: int) -> Iterator[Figure]:
    for part, name in names.items():
        unit, scale = UNITS.get(part, ("us", 1e-3))
        yield figure(name, f"{num_tokens} tok", [float(step[part]) for step in steps], unit, "", scale)


def main() -> None:
    """Print what hands a step over, and with vLLM's interpreter both sides of whole steps."""
    parser = argparse.ArgumentParser(prog="benchmarks.steps_in_turns", description=main.__doc__)
    parser.add_argument("--vllm-python", help="the interpreter of an environment with vLLM (`make peers` makes one)")
    options = parser.parse_args()
    print(HEADERS[print_markdown])
    for row in step_figures():
        print_markdown(row)
    for row in figures_in_turns(options.vllm_python) if options.vllm_python else ():
        print_markdown(row)


if __name__ == "__main__":
    main()
