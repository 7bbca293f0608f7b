"""Messages as vLLM's and SGLang's own publishers sent them, recorded (`tests/interop/vllm_recorder.py`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from blockyard import CacheSalt
from blockyard.events import Mirror, Trust

RECORDED = {path.stem: json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "recorded").iterdir())}
STREAMS = [(name, place) for name, each in RECORDED.items() for place in range(len(each["streams"]))]


def compare(mirror: Mirror, truth: list[list[Any]]) -> int:
    """Each prompt's leading tokens, as the cache itself said; how many had any."""
    assert mirror.trust("worker") is Trust.LIVE
    for tokens, salt, num_tokens in truth:
        found = mirror.match(tokens, () if salt is None else (CacheSalt(salt),)).get("worker")
        assert (0 if found is None else found.num_tokens) == num_tokens, tokens
    return sum(num_tokens > 0 for _, _, num_tokens in truth)


@pytest.mark.parametrize(("name", "place"), STREAMS)
def test_a_mirror_that_comes_at_any_time_says_what_the_cache_had(name: str, place: int) -> None:
    """It hears some live messages, asks for a replay from 0, and goes on live. No cache was reset."""
    stream = RECORDED[name]["streams"][place]
    messages = [(number, bytes.fromhex(payload)) for number, payload in stream["messages"]]
    assert b"AllBlocksCleared" not in b"".join(payload for _, payload in messages)
    truths = dict(stream["truths"])
    num_hits = 0
    for joined in range(1, len(messages), 3):
        mirror = Mirror(hash_seed=1)
        for message in messages[max(0, joined - 2) : joined]:
            mirror.receive_live("worker", *message)
        assert mirror.replay_from("worker") == 0
        for message in messages[:joined]:
            mirror.receive_replayed("worker", *message)
        mirror.end_replay("worker")
        for number in range(joined, len(messages)):
            mirror.receive_live("worker", *messages[number])
            if number + 1 in truths:
                num_hits += compare(mirror, truths[number + 1])
    assert num_hits > 20
