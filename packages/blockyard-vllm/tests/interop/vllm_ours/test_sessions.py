"""Requests that vLLM changes after they were added: streaming sessions whose later inputs bring images."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config.kv_events import KVEventsConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from blockyard import Span
from blockyard.events import Mirror, Subscriber

from . import engine as engine_module
from .engine import BLOCK_SIZE, HASHER, LEVELS, NO_TOKEN, Engine
from .test_hits import colliding
from .test_options import collect
from .test_pool_events import ANY_PORT, follow, require_equal
from .test_programs import Program

#: Tokens that stand in the place of an image.
PLACEHOLDER = 151655
Images = tuple[tuple[str, int, int], ...]


def features_of(images: Images) -> list[MultiModalFeatureSpec]:
    """vLLM's own, of (identifier, offset, length); made anew each time, as vLLM moves their positions."""
    return [
        MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, length))
        for identifier, offset, length in images
    ]


def input_of(name: str, tokens: list[int], images: Images = (), num_new: int = 1, **others: Any) -> Request:
    """One input of a session, or a whole request with `resumable=False`. Positions of images count from its start."""
    params = SamplingParams(max_tokens=num_new, ignore_eos=True, temperature=0)
    params.update_from_generation_config({}, NO_TOKEN)
    given: dict[str, Any] = {"resumable": True, "block_hasher": HASHER} | others
    return Request(name, list(tokens), params, None, mm_features=features_of(images), **given)


class SeeingEngine(Engine):
    """An engine whose model takes images."""

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.scheduler.max_num_encoder_input_tokens = 4096
        self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=4096)

    def end(self, name: str) -> None:
        """The client of a session says that no more input comes."""
        self.add(input_of(name, [], resumable=False))
        self.drain()

    def hits_of(self, *args: Any, **others: Any) -> int:
        """The tokens that a whole request hits."""
        before = self.hits
        self.add(input_of(*args, resumable=False, **others))
        self.drain()
        return self.hits - before


FIRST = list(range(100, 120))
#: The second input: 36 tokens of an image behind 4 of text.
SECOND = [7, 8, 9, 10, *[PLACEHOLDER] * 36]
WHOLE = FIRST + SECOND
IMAGE_AT = len(FIRST) + 4


def served_session(engine: SeeingEngine, image: str, **others: Any) -> None:
    """Two inputs, the second one with an image. Each asks for one token, which is dropped as the next input comes."""
    engine.add(input_of("session", FIRST, **others))
    engine.drain()
    engine.add(input_of("session", SECOND, ((image, 4, 36),), **others))
    engine.drain()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("level", ["stock", *LEVELS])
def test_image_of_a_later_input_is_in_the_keys(level: str, asynchronous: bool) -> None:
    engine = SeeingEngine(level, 100, asynchronous)
    served_session(engine, "cat")
    assert engine.hits_of("equal", WHOLE, (("cat", IMAGE_AT, 36),)) == 48
    assert engine.hits_of("other image", WHOLE, (("dog", IMAGE_AT, 36),)) == 16
    assert engine.hits_of("text", WHOLE) == 16
    engine.end("session")
    engine.require_empty()


def test_text_never_hits_the_image_of_a_later_input() -> None:
    """Under a hash that is the same for all blocks, only the pool's own comparison is left."""
    hasher = get_request_block_hasher(BLOCK_SIZE, colliding)
    engine = SeeingEngine("tokens", 100)
    served_session(engine, "cat", block_hasher=hasher)
    assert engine.hits_of("text", WHOLE, block_hasher=hasher) == 16
    assert engine.hits_of("other image", WHOLE, (("dog", IMAGE_AT, 36),), block_hasher=hasher) == 16
    assert engine.hits_of("shifted", [*WHOLE, 1], (("cat", IMAGE_AT + 1, 36),), block_hasher=hasher) == 16
    assert engine.hits_of("equal", WHOLE, (("cat", IMAGE_AT, 36),), block_hasher=hasher) == 48
    engine.end("session")
    engine.require_empty()


def test_published_blocks_of_a_later_input_have_its_image() -> None:
    engine = SeeingEngine("tokens", 100, options={"events": ANY_PORT})
    image = Span("cat", IMAGE_AT, 36, "mm")
    with Subscriber(Mirror()) as subscriber:
        follow(subscriber, engine)
        served_session(engine, "cat")
        require_equal(subscriber, engine, [FIRST])
        assert subscriber.mirror.match(WHOLE, (image,))["worker"].num_tokens == 48
        assert subscriber.mirror.match(WHOLE)["worker"].num_tokens == 16
    engine.scheduler.shutdown()


@pytest.mark.parametrize("level", LEVELS)
def test_events_of_sessions_equal_vllms(level: str) -> None:
    events: dict[str, list[Any]] = {}
    for each in ("stock", level):
        settings = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        engine = SeeingEngine(each, 100, events=settings)
        collect(engine, events.setdefault(each, []))
        served_session(engine, "cat")
        engine.end("session")
    assert any(event.extra_keys and any(event.extra_keys) for event in events["stock"])
    assert events[level] == events["stock"]


class Sessions(Program):
    """Sessions with images beside ordinary requests that repeat them."""

    def __init__(self, seed: int, engines: list[Any]) -> None:
        super().__init__(seed, engines)
        self.sessions: list[str] = []

    def some_input(self, length: int) -> tuple[list[int], Images]:
        """Tokens that others have too, with up to two images that do not overlap."""
        tokens = self.random.choice(self.prefixes)[:length] + [self.random.randrange(3)] * self.random.randrange(1, 40)
        images: list[tuple[str, int, int]] = []
        at = 0
        for _ in range(self.random.randrange(3)):
            at += self.random.randrange(20)
            size = self.random.randrange(1, 40)
            if at + size > len(tokens):
                break
            images.append((f"{self.random.choice('ab')} of {size}", at, size))
            tokens[at : at + size] = [PLACEHOLDER] * size
            at += size
        return tokens, tuple(images)

    def add(self) -> None:
        """An ordinary request, which may repeat what a session has said so far."""
        known = self.engines[0].scheduler.requests
        said = [known[name] for name in self.sessions if name in known]
        if said and self.random.random() < 0.5:
            session = self.random.choice(said)
            # Stock may have cached the session's tokens up to here, with these images.
            tokens = [*session.all_token_ids, 1]
            images = tuple(
                (one.identifier, one.mm_position.offset, one.mm_position.length) for one in session.mm_features
            )
        else:
            tokens, images = self.some_input(120)
        name = f"r{len(self.names)}"
        self.names.append(name)
        num_new = self.random.randrange(1, 20)
        for engine in self.engines:
            engine.add(input_of(name, tokens, images, num_new, resumable=False))

    def talk(self) -> None:
        """The next input of a session: a new one, one that waits, runs or was preempted."""
        known = self.engines[0].scheduler.requests
        name = f"s{self.random.randrange(4)}-{len(self.names) // 20}"
        if name in known and known[name].num_tokens > 300:
            return
        if name not in self.sessions:
            self.sessions.append(name)
            self.names.append(name)
        elif name not in known:
            return
        tokens, images = self.some_input(40)
        num_new = self.random.randrange(1, 10)
        for engine in self.engines:
            engine.add(input_of(name, tokens, images, num_new))

    def hang_up(self) -> None:
        """End a session."""
        known = self.engines[0].scheduler.requests
        for name in [name for name in self.sessions if name in known][:1]:
            for engine in self.engines:
                engine.add(input_of(name, [], resumable=False))

    def run(self, num_operations: int) -> None:
        """Do random work, then serve all requests to their ends."""
        operations = [self.add, self.talk, self.hang_up, self.abort, self.step]
        for _ in range(num_operations):
            self.random.choices(operations, (10, 12, 2, 3, 73))[0]()
            self.compare()
        for engine in self.engines:
            engine.drain()
            engine.abort(self.sessions)
            engine.drain()
        self.compare()
        for engine in self.engines:
            engine.require_empty()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("num_blocks", [70, 400])
@pytest.mark.parametrize("seed", range(4))
def test_sessions_with_images_behave_as_in_vllm(seed: int, num_blocks: int, asynchronous: bool) -> None:
    """Tokens, hits, free blocks and the state of every request, after each operation."""
    settings = {"max_model_len": 512, "max_num_batched_tokens": 128, "asynchronous": asynchronous}
    engines = [SeeingEngine(level, num_blocks, **settings) for level in ("stock", *LEVELS)]
    program = Sessions(seed, engines)
    program.run(250)
    assert len(program.sessions) > 2
    assert engines[0].hits > 0


@pytest.mark.parametrize("level", ["stock", *LEVELS])
def test_next_input_waits_for_the_watermark(level: str) -> None:
    """vLLM admits a session's next input as it admits a request: beside others, some blocks must stay free."""
    engine = SeeingEngine(level, 101)
    engine.scheduler.scheduler_reserve_full_isl = False
    engine.manager.watermark_blocks = 30
    engine.add(input_of("session", FIRST))
    engine.drain()
    engine.add(input_of("long", list(range(1000, 2200)), num_new=40, resumable=False))
    engine.step()
    engine.add(input_of("session", [1, 2]))
    planned = [engine.step() for _ in range(3)]
    assert all("session" not in step for step in planned), "75 blocks are held by the other request, 23 are free"
    engine.drain()
    engine.end("session")
    engine.require_empty()


def embedded(name: str, rows: list[int], hasher: Any) -> Request:
    """A request of embeddings, each of whose rows is filled with one number."""
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
    params.update_from_generation_config({}, NO_TOKEN)
    embeddings = torch.tensor(rows, dtype=torch.float32)[:, None].expand(-1, 4).contiguous()
    return Request(name, None, params, None, prompt_embeds=embeddings, block_hasher=hasher)


@pytest.mark.parametrize(
    ("level", "hasher"),
    [
        *[(level, HASHER) for level in ("stock", *LEVELS)],
        ("tokens", get_request_block_hasher(BLOCK_SIZE, colliding)),
    ],
)
def test_embeddings_of_a_block_that_output_completes_are_in_its_key(
    level: str, hasher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests differ in rows 16 to 24 only. The second is preempted, and hits its own blocks again."""
    monkeypatch.setattr(engine_module, "token_of", lambda name, place: 5)
    engine = Engine(level, 100)
    for name, last in (("first", 1), ("second", 2)):
        engine.add(embedded(name, [9] * 16 + [last] * 8, hasher))
    for _ in range(12):
        engine.step()
    request = engine.scheduler.requests["second"]
    assert request.num_computed_tokens > 2 * BLOCK_SIZE
    blocks = engine.manager.get_block_ids("second")[0]
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, 0.0)
    engine.step()
    assert engine.manager.get_block_ids("second")[0][:2] == blocks[:2]
    assert request.num_computed_tokens > 2 * BLOCK_SIZE
    engine.drain()
    engine.require_empty()


@pytest.mark.parametrize("level", ["stock", *LEVELS])
@pytest.mark.parametrize(
    "given",
    [
        {"cache_salt": "half of a pair: \ud83d"},
        {"images": (("", 4, 36),)},
        {"images": (("half of a pair: \ud83d", 4, 36),)},
        {"images": (("cat", 4, 0),)},
        {"images": (("cat", 4, 36), ("cat", 4, 36))},
        {"images": (("film", 4, 36), ("sound of it", 6, 20))},
        {"lora_request": LoRARequest("poet \ud83d", 1, "/poet \ud83d")},
    ],
)
def test_no_key_of_a_request_stops_the_engine(level: str, given: dict[str, Any]) -> None:
    """vLLM accepts any key and hits on equal ones."""
    engine = SeeingEngine(level, 100)
    found = [engine.hits_of(f"r{number}", SECOND, **given) for number in range(2)]
    assert found == [0, 32]
    engine.require_empty()
