"""`python -m benchmarks.sessions`: SmolLM2 serves sessions that overflow its pool, under each order of admission.

Each session sends its next turn as soon as it is answered. Printed for each order: prompt tokens computed and seconds,
beside arrival's; whether all answers are equal decides the exit status.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import numpy as np

from blockyard_engine import Engine, SamplingParams, demo_model_path
from blockyard_engine.engine_options import ADMISSION_ORDERS


def serve(engine: Engine, arguments: argparse.Namespace) -> dict[str, Any]:
    """Serve all sessions; return their answers, the prompt tokens computed, the seconds and the longest latency."""
    rng = np.random.default_rng(arguments.seed)
    vocabulary = engine.shape.vocab_size
    contexts: list[list[int]] = rng.integers(1000, vocabulary, (arguments.sessions, arguments.first)).tolist()
    news = rng.integers(1000, vocabulary, (arguments.sessions, arguments.turns, arguments.more)).tolist()
    sampling = SamplingParams(max_tokens=arguments.answer, ignore_eos=True)
    turns, sent, latencies = [0] * arguments.sessions, {}, []
    answers: dict[str, list[int]] = {}
    num_computed, began = 0, time.monotonic()

    def send(session: int) -> None:
        contexts[session] += news[session][turns[session]]
        number = engine.add_request(contexts[session], sampling, session=f"session {session}")
        sent[number] = (session, time.monotonic())

    for session in range(arguments.sessions):
        send(session)
    while engine.has_unfinished:
        for result in engine.step().finished:
            session, since = sent.pop(result.request_id)
            latencies.append(time.monotonic() - since)
            num_computed += result.num_prompt_tokens - result.num_cached_tokens
            answers[f"{session}.{turns[session]}"] = result.completions[0].token_ids
            contexts[session] += result.completions[0].token_ids
            turns[session] += 1
            if turns[session] < arguments.turns:
                send(session)
        time.sleep(min(engine.idle_seconds, 1.0))
    return {
        "answers": answers,
        "computed": num_computed,
        "seconds": round(time.monotonic() - began, 1),
        "longest latency": round(max(latencies), 1),
    }


def main() -> int:
    """Measure and print; exit status 1 if an answer differs."""
    parser = argparse.ArgumentParser(prog="benchmarks.sessions", description=__doc__)
    sizes = {"sessions": 8, "turns": 5, "first": 256, "more": 48, "answer": 16, "seed": 0, "max-num-seqs": 3}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("--overflow", type=float, default=4.0, help="final contexts per pool; default: 4")
    arguments = parser.parse_args()
    final = arguments.sessions * (arguments.first + arguments.turns * (arguments.more + arguments.answer))
    num_blocks = 1 + round(final / arguments.overflow / 16)
    runs = {}
    for order in ADMISSION_ORDERS:
        engine = Engine.from_pretrained(
            demo_model_path(),
            num_blocks=num_blocks,
            max_num_seqs=arguments.max_num_seqs,
            max_model_len=final // arguments.sessions,
            admission=order,
        )
        runs[order] = serve(engine, arguments)
        print(order, {name: value for name, value in runs[order].items() if name != "answers"}, file=sys.stderr)
        engine.close()
    is_equal = all(run.pop("answers") == first for first in [runs["arrival"]["answers"]] for run in runs.values())
    print(json.dumps({"num_blocks": num_blocks, "final tokens": final, "equal answers": is_equal, **runs}, indent=1))
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
