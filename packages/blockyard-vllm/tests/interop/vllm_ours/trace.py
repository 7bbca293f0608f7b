"""`python -m tests.interop.vllm_ours.trace TRACE [--requests N]`: a trace through vLLM's scheduler, stock and ours.

TRACE has a JSON object a line with `hash_ids`, one for each 512 tokens of a prompt, as Mooncake's have. A block here
has 16 tokens, its hash id 16 times, so hits count in blocks of the trace. The last N requests are replayed in order,
four a step, each with one token of output. Prints a table: hit blocks, stock and each policy on each level, by the
number of blocks. Exit status 1 if a level's LRU does not hit what stock hits.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from .engine import BLOCK_SIZE, Engine, request_of

SIZES = (2_000, 8_000, 32_000)
RIVALS = ("lru", "density", "s3fifo", "arc")
A_STEP = 4


def prompts_of(file: Path, num_requests: int) -> list[list[int]]:
    """Token ids of the last requests."""
    lines = file.read_text().splitlines()[-num_requests:]
    return [[name for name in json.loads(line)["hash_ids"] for _ in range(BLOCK_SIZE)] for line in lines]


def hasher_of() -> Any:
    """Hashes as vLLM makes them, but each prefix once for all runs: equal prompts have equal hashes."""
    numbers: dict[tuple[bytes, int], bytes] = {}

    def hashes(request: Any) -> list[bytes]:
        made = list(request.block_hashes)
        first = len(made)
        tokens = request.all_token_ids
        for block in range(first, request.num_tokens // BLOCK_SIZE):
            before = made[-1] if made else b""
            # All tokens of a block are its id, and the one token of output never fills a block.
            key = before, tokens[block * BLOCK_SIZE]
            made.append(numbers.setdefault(key, len(numbers).to_bytes(32, "big")))
        return made[first:]

    return hashes


def replay(engine: Engine, prompts: list[list[int]], hasher: Any) -> tuple[int, int]:
    """Blocks that were hit, and asked for."""
    for first in range(0, len(prompts), A_STEP):
        for place, tokens in enumerate(prompts[first : first + A_STEP], first):
            engine.add(request_of(str(place), tokens, 1, hasher))
        engine.drain()
        engine.tokens.clear()
    engine.require_empty()
    return engine.hits // BLOCK_SIZE, engine.queries // BLOCK_SIZE


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=6000, help="how many of the last ones (default: 6000)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="blocks of the pools")
    asked = parser.parse_args()
    prompts = prompts_of(asked.trace, asked.requests)
    longest = max(map(len, prompts)) + BLOCK_SIZE
    hasher = hasher_of()
    differ = False
    print(f"| blocks | stock | {' | '.join(RIVALS)} | lru by names |\n|{'---|' * (len(RIVALS) + 3)}")
    for num_blocks in asked.sizes:
        settings = {"max_model_len": longest, "max_num_batched_tokens": A_STEP * longest}
        runs = [("stock", {})] + [("tokens", {"eviction_policy": name}) for name in RIVALS] + [("names", {})]
        found = []
        for level, options in runs:
            engine = Engine(level, num_blocks, options=options, **settings)
            found.append(replay(engine, prompts, hasher))
        stock, num_asked = found[0]
        cells = [f"{hits} ({100 * hits / num_asked:.1f} %)" for hits, _ in found]
        print(f"| {num_blocks} | {' | '.join(cells)} |", flush=True)
        differ = differ or not stock == found[1][0] == found[-1][0]
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
