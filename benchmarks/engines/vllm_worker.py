"""`python vllm_worker.py MODEL DTYPE REQUESTS LENGTH`: vLLM by itself, a round for each line on stdin.

It imports nothing of this project, whose interpreter is another. The first line it prints is its version.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams, __version__

STEP_TOKENS = 2048


def main() -> None:
    model, dtype, num_requests, max_len = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    llm = LLM(
        model,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_num_seqs=num_requests,
        max_model_len=max_len,
        max_num_batched_tokens=max(STEP_TOKENS, num_requests, max_len),
        disable_log_stats=True,
    )
    say({"version": f"vLLM {__version__}"})
    for line in sys.stdin:
        say(answer(llm, **json.loads(line)))


def say(what: dict[str, Any]) -> None:
    """One line of JSON; vLLM's own messages go elsewhere or begin otherwise."""
    print(json.dumps(what), flush=True)


def answer(llm: LLM, prompts: list[list[int]], num_new: int) -> dict[str, Any]:
    """One round."""
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    outputs = llm.generate(asked, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return {"token_ids": [list(output.outputs[0].token_ids) for output in outputs], "seconds": seconds}


if __name__ == "__main__":
    main()
