"""A reference engine: continuous batching of Hugging Face models over Blockyard's blocks.

    from blockyard.engine import Engine, SamplingParams

    engine = Engine.from_pretrained("path/to/model")
    for result in engine.generate(["The capital of France is"], SamplingParams(max_tokens=16)):
        print(result.text)

Read it in this order, a file at a time:

    sampling, results, request   what is asked for, and what becomes of it
    scheduling/                  who computes what in the next step: step, limits, preemption, prefixes, scheduler
    decoding/                    from logits to text: sampler, speculation, text (stop strings)
    attention/                   a step's attention over the KV tensors: interface, reach, softmax, sdpa; latent (MLA);
                                 paged, flash_attention, flashinfer (CUDA); merging, context (tokens shared over
                                 ranks); backends (which is chosen); hook (how transformers calls it)
    shape                        what an engine knows of its model
    borrowing                    a model whose attention is ours while a step runs
    checks/, probe               whether a model can be served, and what it asks of its cache
    moves, runner                a step's block moves and forward pass, through transformers' attention interface
    memory/                      how many blocks fit: the largest step, run to see what it takes; the sum
    cache_options                fields of the cache's config that callers may set
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

from ..errors import MissingExtra, ModelError, RankError

try:
    import torch as _torch  # noqa: F401  # asked for here, so that its absence is said in one sentence
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise MissingExtra(
        f"blockyard.engine needs {error.name or 'torch and transformers'}: pip install 'blockyard[engine]'"
    ) from error

from .decoding.speculation import PromptLookup
from .engine import Engine
from .model import demo_model_path
from .results import Completion, FinishReason, GenerationResult, NewToken, StepReport, TokenLogprob
from .sampling import SamplingParams

__all__ = [
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
    "demo_model_path",
]
