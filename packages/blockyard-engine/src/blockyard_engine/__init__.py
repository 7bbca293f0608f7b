"""A reference engine: continuous batching of Hugging Face models over Blockyard's blocks.

    from blockyard_engine import Engine, SamplingParams

    engine = Engine.from_pretrained("path/to/model")
    for result in engine.generate(["The capital of France is"], SamplingParams(max_tokens=16)):
        print(result.text)

Read it in this order, a file at a time:

    sampling, results, request   what is asked for, and what becomes of it
    scheduling/                  who computes what in the next step: step, limits, preemption, prefixes, scheduler
    decoding/                    from logits to text: sampler, speculation, text (stop strings)
    attention/                   a step's attention over the KV tensors: interface, softmax, sdpa; latent (MLA);
                                 flash_attention (CUDA); context (tokens shared over ranks); backends
                                 (which is chosen); hook (how transformers calls it)
    shape                        what an engine knows of its model
    borrowing                    a model whose attention is ours while a step runs
    checks/, probe               whether a model can be served, and what it asks of its cache
    tiering                      tiers below the pool, and the model's fingerprint
    moves, runner                a step's block moves and forward pass, through transformers' attention interface
    memory/                      how many blocks fit: the largest step, run to see what it takes; the sum
    options                      what an engine is asked to be, checked before anything is loaded
    beams/                       beam search: hypotheses, search, batch
    ranks/                       the same step on several processes (tensor and context parallel)
    gguf, model                  weights and tokenizers from folders and files
    prompts, intake              the door: text in, requests checked
    reasons                      what other libraries' errors come down to
    assembly                     the parts, each made from those before it
    engine                       all of it together

It uses the public manager and nothing of its inside, so it doubles as an example of wiring one.
Needs torch and transformers: `pip install 'blockyard[engine]'`.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from blockyard.errors import MissingExtra, ModelError, RankError

from .decoding.speculation import PromptLookup
from .results import Completion, FinishReason, GenerationResult, NewToken, StepReport, TokenLogprob
from .sampling import SamplingParams

if TYPE_CHECKING:
    from .engine import Engine
    from .memory.account import CPU_KV_BYTES
    from .memory.finding import available_bytes
    from .model import demo_model_path

__all__ = [
    "CPU_KV_BYTES",
    "Completion",
    "Engine",
    "FinishReason",
    "GenerationResult",
    "ModelError",
    "NewToken",
    "PromptLookup",
    "RankError",
    "SamplingParams",
    "StepReport",
    "TokenLogprob",
    "available_bytes",
    "demo_model_path",
]

#: What takes seconds to import is imported when it is first asked for, so that wrong options are told at once.
_PLACES = {
    "CPU_KV_BYTES": ".memory.account",
    "Engine": ".engine",
    "available_bytes": ".memory.finding",
    "demo_model_path": ".model",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for needed in ("torch", "transformers"):
        if find_spec(needed) is None:
            raise MissingExtra(f"blockyard_engine needs {needed}: pip install 'blockyard[engine]'")
    return getattr(import_module(_PLACES[name], __name__), name)
