"""A process with write-back is killed with SIGKILL: the blocks it left on disk after a stored prefix load correctly."""

from __future__ import annotations

import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

from blockyard_testing.patience import PATIENCE_SECONDS
from blockyard_testing.seeds import run_seed
from blockyard_tiers import NameChain

from .test_offload import SmallEngine


def prompt_of(turn: int) -> list[int]:
    """Return a prompt with one of six prefixes, which the pool keeps because they hit often; the rest is evicted."""
    return [turn % 6 + 1] * 20 + list(range(1000 + 100 * turn, 1050 + 100 * turn))


def serve_until_killed(folder: Path, turns: Connection) -> None:
    engine = SmallEngine(folder, write="back")
    for turn in range(10**6):
        engine.serve(prompt_of(turn))
        turns.send(turn)


def test_stored_prefixes_are_loaded_after_kill_9(tmp_path: Path) -> None:
    draw = random.Random(run_seed())
    spawn = multiprocessing.get_context("spawn")
    num_loaded = 0
    for part in range(2):
        folder = tmp_path / str(part)
        told, turns = spawn.Pipe(duplex=False)
        process = spawn.Process(target=serve_until_killed, args=(folder, turns), daemon=True)
        process.start()
        turns.close()
        try:
            for _ in range(draw.randint(10, 40)):
                assert told.poll(PATIENCE_SECONDS)
                last = told.recv()
            time.sleep(draw.random() / 50)
        finally:
            process.kill()
            process.join()
        assert process.exitcode == -9
        engine = SmallEngine(folder, write="never")
        engine.offload.note_computed(512, PATIENCE_SECONDS)  # so a load is waited for, however busy the machine is
        on_disk = set(engine.tier.names())
        layout = engine.offload._context.layout()
        for turn in range(last + 10):  # the process may have been killed some turns after the last one it reported
            tokens = prompt_of(turn)
            chain = NameChain(layout, 4)
            chain.extend(tokens)
            names = chain.names[: (len(tokens) - 1) // 4]
            stored = next((place for place, name in enumerate(names) if name not in on_disk), len(names))
            engine.cache.reset_prefix_cache()
            # serve() compares what was loaded with what is right.
            assert engine.serve(tokens) == stored * 4, engine.offload.read().missed_tokens
            num_loaded += stored
        stats = engine.tier.stats()
        assert not stats.load_misses
        engine.close()
    assert num_loaded > 50
