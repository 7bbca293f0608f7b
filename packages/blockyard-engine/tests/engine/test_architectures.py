"""Every architecture of transformers that can be made small has the tokens of `generate`, or is refused.

The trial that an engine makes of its model (`checks.trial`) is not trusted here: whole engines run chunks, batches and
prefix hits of prompts longer than windows.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from blockyard_engine import Engine, ModelError, SamplingParams
from blockyard_engine.model import quiet_transformers

from ..support.architectures import ARCHITECTURES, SERVED, small_architecture

NUM_TOKENS = 6


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with quiet_transformers():
        yield


@pytest.mark.drawn
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_equal_or_refused(name: str) -> None:
    model = small_architecture(name)
    if name not in SERVED:
        with pytest.raises(ModelError, match=r"^.+$"):  # a line
            _engine(model)
        return
    engine = _engine(model)
    prompts = _prompts(engine.shape.vocab_size)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    (alone,) = engine.generate(prompts[:1], sampling)
    beside = engine.generate(prompts, sampling)
    assert [alone.token_ids, *(result.token_ids for result in beside)] == _generated(model, [prompts[0], *prompts])
    # A state is kept where a prompt left what was known: the next one hits it.
    hit = beside[1] if engine.shape.states is None else engine.generate(prompts[1:2], sampling)[0]
    assert hit.num_cached_tokens >= 20
    assert hit.token_ids == beside[1].token_ids


def _engine(model: Any) -> Engine:
    return Engine(model, num_blocks=600, block_size=4, max_num_seqs=3, max_num_batched_tokens=17, **_limit(model))


def _limit(model: Any) -> dict[str, int]:
    """Set a maximum length for configs without one."""
    own = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return {} if own else {"max_model_len": 256}


def _prompts(vocab_size: int) -> list[list[int]]:
    """Return three prompts of 33 tokens; the first two share a prefix."""
    tokens = torch.randint(1, vocab_size, (3, 33), generator=torch.Generator().manual_seed(5))
    tokens[1, :23] = tokens[0, :23]
    return [row.tolist() for row in tokens]


def _generated(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Return the answers of `generate` with eager attention: other kinds silently drop soft caps."""
    model.set_attn_implementation("eager")
    ids = torch.tensor(prompts)
    mask = torch.ones_like(ids)
    output = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=None)
    return [row[ids.shape[1] :].tolist() for row in output]
