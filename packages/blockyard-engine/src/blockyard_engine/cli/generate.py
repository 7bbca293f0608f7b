"""`blockyard generate`: prints completions of prompts from the shell."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any, TextIO

from blockyard.errors import InvalidArgument

from .. import GenerationResult, SamplingParams, StepReport
from .model_loading import engine_arguments, follow_torchrun, load_engine

if TYPE_CHECKING:
    from .. import Engine

_MAX_PROMPTS = 10_000
_MAX_LINE = 2**20


def run_generate(options: argparse.Namespace) -> int:
    """Generate and print: one completion in pieces, several in order at the end."""
    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "n", "ignore_eos")
    sampling = SamplingParams(**{name: getattr(options, name) for name in names}, stop=tuple(options.stop))
    arguments = engine_arguments(options)
    follow_torchrun(options)
    prompts = _prompts(options, sys.stdin)
    engine, _ = load_engine(options, arguments)
    with closing(engine):
        _generate(options, engine, prompts, sampling)
    return 0


def _generate(options: argparse.Namespace, engine: Engine, prompts: list[Any], sampling: SamplingParams) -> None:
    if len(prompts) == sampling.n == 1 and not options.json:
        _stream(engine, prompts[0], sampling)
        return
    for number, result in enumerate(engine.generate(prompts, sampling, progress=True)):
        if options.json:
            _show_json(number, result)
        else:
            _show_text(number, result, len(prompts) * sampling.n > 1)


def _prompts(options: argparse.Namespace, source: TextIO) -> list[Any]:
    """Return the prompts of the command line, or the lines of `source`, as text or as chats."""
    if options.system is not None and not options.chat:
        raise InvalidArgument("--system is given without --chat; add --chat")
    try:
        texts = options.prompts or _lines(source)
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"standard input is not {error.encoding} ({error.reason})") from None
    if not options.chat:
        return list(texts)
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return [[*system, {"role": "user", "content": text}] for text in texts]


def _lines(source: TextIO) -> list[str]:
    if source.isatty():
        print("one prompt a line; end with Ctrl-D", file=sys.stderr)
    texts: list[str] = []
    while line := source.readline(_MAX_LINE):
        if line.strip():
            texts.append(line.rstrip("\n"))
        if len(texts) > _MAX_PROMPTS:
            raise InvalidArgument(f"standard input has more than {_MAX_PROMPTS} prompts, the limit")
    if not texts:
        raise InvalidArgument("there is no prompt: give one, or lines on standard input")
    return texts


def _stream(engine: Engine, prompt: Any, sampling: SamplingParams) -> None:
    num_printed = 0

    def show(report: StepReport) -> None:
        nonlocal num_printed
        for token in report.new_tokens:
            print(token.text, end="", flush=True)
            num_printed += len(token.text)

    result = engine.generate([prompt], sampling, on_step=show)[0]
    print(result.text[num_printed:])


def _show_text(number: int, result: GenerationResult, has_several: bool) -> None:
    for completion in result.completions:
        if has_several:
            print(f"--- prompt {number}, completion {completion.index}")
        print(completion.text)


def _show_json(number: int, result: GenerationResult) -> None:
    for completion in result.completions:
        shown = {
            "prompt": number,
            "index": completion.index,
            "text": completion.text,
            "finish_reason": str(completion.finish_reason),
            "num_tokens": len(completion.token_ids),
            "num_prompt_tokens": result.num_prompt_tokens,
            "num_cached_tokens": result.num_cached_tokens,
        }
        print(json.dumps(shown))
