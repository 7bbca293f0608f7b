"""A reference engine: continuous batching of Hugging Face models over Blockyard's blocks.

    from blockyard_engine import Engine, SamplingParams

    engine = Engine.from_pretrained("path/to/model")
    for result in engine.generate(["The capital of France is"], SamplingParams(max_tokens=16)):
        print(result.text)

Read it in this order, a file at a time:

    sampling, results, request   a request, its sampling parameters and its results
    scheduling/                  the tokens of the next step: step, limits, preemption, prefixes, scheduler
    decoding/                    from logits to text: sampler, speculation, text (stop strings)
    attention/                   attention over the KV tensors: interface, softmax, sdpa; latent (MLA);
                                 flash_attention (CUDA); context (context parallel); backends (the choice)
    patching                     switches a transformers model to this attention during a step
    shape                        the sizes of a model's KV cache
    checks/, probe               whether a model can be served, and the shape of its cache
    tiering                      tiers below the pool, and the model's fingerprint
    moves, runner                a step's block copies and forward pass
    memory/                      the size of the pool: memory of the largest step, blocks that fit beside it
    engine_options               the engine's options, checked before anything is loaded
    beams/                       beam search: hypotheses, search, batch
    ranks/                       the same step on several processes (tensor and context parallel)
    gguf, model                  weights and tokenizers from folders and files
    prompt_encoding,
    input_processor              prompts as text to checked requests
    components                   builds the parts of an engine
    engine                       the engine itself

It uses only the public manager, so it is also an example of how to wire one.
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
    from .memory.pool_sizing import available_bytes
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

#: Modules of the names that are imported on first use, since torch takes seconds: wrong options are reported at once.
_LAZY_MODULES = {
    "CPU_KV_BYTES": ".memory.account",
    "Engine": ".engine",
    "available_bytes": ".memory.pool_sizing",
    "demo_model_path": ".model",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for needed in ("torch", "transformers"):
        if find_spec(needed) is None:
            raise MissingExtra(f"blockyard_engine needs {needed}: pip install 'blockyard[engine]'")
    return getattr(import_module(_LAZY_MODULES[name], __name__), name)
