"""`python -m tests.interop.vllm_ours.states`, run by vLLM's interpreter: prompts that begin alike, in vLLM's scheduler.

64 requests of 1,600 shared and 600 other tokens, then of 1,500 and 700 (vllm#45238), one after another, to a model of
full attention and two groups of states: tokens that the first three hit, how many hit, and the share of all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher

from .engine import Engine, request_of

NUM_REQUESTS, NUM_DECODED = 64, 16
LOADS = ((1600, 600), (1500, 700))
PLACES = ["branch", "ends", "pow2"]


def hits_of(
    level: str,
    page: int,
    unit: int,
    load: tuple[int, int],
    in_flight: int = 1,
    requested: bool = False,
    waits: bool = False,
    **others: Any,
) -> list[int]:
    """The tokens that each request hits, in the order in which they are admitted.

    in_flight: requests that run at once. waits: whether all come at the start. requested: whether each says where
    the shared part ends.
    """
    shared, unique = load
    places = others.pop("state_checkpoints", None)
    options = {"state_checkpoints": places} if places else {}
    settings = {"max_model_len": 4096, "max_num_seqs": in_flight, "options": options}
    engine = Engine(level, 4000, page=page, unit=unit, **(settings | others))
    hasher, hits = get_request_block_hasher(unit, sha256), []
    record = engine.manager.record_prefix_cache_stats

    def admit(request: Any, num_hits: int) -> None:
        hits.append(num_hits)
        record(request, num_hits)

    engine.manager.record_prefix_cache_stats = admit
    for number in range(NUM_REQUESTS):
        tokens = list(range(shared)) + [10_000 * (number + 1) + token for token in range(unique)]
        engine.add(request_of(str(number), tokens, NUM_DECODED, hasher, requested=[shared] if requested else None))
        if not waits:
            engine.drain()
    engine.drain()
    engine.require_empty()
    return hits


def rows() -> Iterator[tuple[str, str, int, int, dict[str, Any]]]:
    """Of each row: its name, level, tokens of a block and of a hash, and what else."""
    yield "stock, mode none", "stock", 528, 528, {"is_cached": False}
    for page in (528, 1056, 1568):
        yield f"stock, blocks of {page}", "stock", page, page, {}
        yield f"stock, blocks of {page}, every chunk's end kept", "stock", page, page, {"retention": None}
        yield f"stock, blocks of {page}, hashes of 16", "stock", page, 16, {}
        yield f"ours, blocks of {page}", "names", page, page, {"state_checkpoints": PLACES}
        yield f"ours, blocks of {page}, hashes of 16", "names", page, 16, {"state_checkpoints": PLACES}
    yield "ours, requested", "names", 528, 16, {"state_checkpoints": [*PLACES, "requested"], "requested": True}


def main() -> None:
    """Print a line for each."""
    print("| shared + other | | hits of request 1, 2, 3 | requests that hit | of all tokens |\n|---|---|---|---|---|")
    for load in LOADS:
        for name, level, page, unit, settings in rows():
            hits = hits_of(level, page, unit, load, **settings)
            share = 100 * sum(hits) / (NUM_REQUESTS * sum(load))
            first, count = ", ".join(map(str, hits[:3])), sum(hit > 0 for hit in hits)
            row = f"| {load[0]} + {load[1]} | {name} | {first} | {count} of {NUM_REQUESTS} | {share:.1f} % |"
            print(row, flush=True)


if __name__ == "__main__":
    main()
