"""What vLLM's own Scheduler takes to make a decode step's SchedulerOutput, and its executor's queue to send it.

`python -m benchmarks.peers.vllm_steps SEQS STEPS TOKENS...` gives JSON: first its version, then for each line on stdin,
a number of tokens, as many steps of one round. No model is loaded: the scheduler is made from vLLM's configuration of a
small one, and the sampled tokens are drawn.
"""

from __future__ import annotations

import copyreg
import io
import json
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import __version__
from vllm.config import VllmConfig
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, _reduce_tensor
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils import random_uuid
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from ..workload import BLOCK_SIZE

MAX_MODEL_LEN = 8192
VOCABULARY = 128_000
#: Tokens of each sequence, besides its prompt, that the size of the pool allows for.
SPARE_TOKENS = 800
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MAX_MODEL_LEN,
}


def vllm_config(num_seqs: int, most_tokens: int) -> VllmConfig:
    """vLLM's own choices for two ranks; all prompts fit one step, so that all sequences decode from the second on."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        return EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_seqs * most_tokens,
            block_size=BLOCK_SIZE,
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
        ).create_engine_config()


class Decode:
    """As benchmarks.steps' requests: their ends are spread over the block. Ids are such as `LLM.generate` gives."""

    def __init__(self, config: VllmConfig, num_seqs: int, num_tokens: int) -> None:
        num_blocks = 2 * num_seqs * (num_tokens + SPARE_TOKENS) // BLOCK_SIZE
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        self.scheduler: Any = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
        )
        self.draw = np.random.default_rng(7)
        hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        sampling = SamplingParams(max_tokens=MAX_MODEL_LEN, ignore_eos=True)
        for number in range(num_seqs):
            prompt = self.draw.integers(0, VOCABULARY, num_tokens - number % BLOCK_SIZE).tolist()
            name = f"{number}-{random_uuid():.8}"
            self.scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=hasher))
        self.finish(self.scheduler.schedule())
        freeze_gc_heap()

    def finish(self, output: SchedulerOutput) -> float:
        """Nanoseconds that the scheduler takes to process a token of each request."""
        ids = list(output.num_scheduled_tokens)
        sampled = self.draw.integers(0, VOCABULARY, (len(ids), 1)).tolist()
        made = ModelRunnerOutput(ids, {one: row for row, one in enumerate(ids)}, sampled)
        return timed(lambda: self.scheduler.update_from_output(output, made))[0]


@contextmanager
def message_queue() -> Iterator[tuple[MessageQueue, MessageQueue]]:
    """The executor's queue in shared memory: its writer and one reader, both in this process."""
    writer = MessageQueue(1, 1, max_chunk_bytes=1 << 20)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    writer.wait_until_ready()
    reader.wait_until_ready()
    try:
        yield writer, reader
    finally:
        reader.shutdown()
        writer.shutdown()


def pickled(message: object) -> bytes:
    """As `MessageQueue.enqueue` pickles."""
    with io.BytesIO() as file:
        pickler = pickle.Pickler(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=lambda buffer: True)
        pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: _reduce_tensor}
        pickler.dump(message)
        return file.getvalue()


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Nanoseconds of a call, and what it returned."""
    begin = time.perf_counter_ns()
    result = call()
    return float(time.perf_counter_ns() - begin), result


def run_step(decode: Decode, writer: MessageQueue, reader: MessageQueue) -> dict[str, float]:
    """One decode step: made, sent as `MultiprocExecutor.execute_model` sends it, finished."""
    schedule, output = timed(decode.scheduler.schedule)
    message: Any = ("execute_model", (output,), {}, 0)
    pickling, payload = timed(lambda: pickled(message))
    unpickling, read = timed(lambda: pickle.loads(payload))
    enqueue, _ = timed(lambda: writer.enqueue(message))
    dequeue, received = timed(lambda: reader.dequeue(timeout=10))
    assert read == received == message
    assert not output.scheduled_new_reqs
    assert set(output.num_scheduled_tokens.values()) == {1}
    return {
        "seqs": float(len(output.num_scheduled_tokens)),
        "blocks": float(sum(one is not None for one in output.scheduled_cached_reqs.new_block_ids)),
        "schedule": schedule,
        "pickle": pickling,
        "unpickle": unpickling,
        "enqueue": enqueue,
        "dequeue": dequeue,
        "update": decode.finish(output),
        "bytes": float(len(payload)),
    }


def main() -> None:
    """Nanoseconds and bytes of each step; medians and leasts are the caller's."""
    num_seqs, num_steps, *lengths = [int(word) for word in sys.argv[1:]]
    init_none_hash(sha256)
    config = vllm_config(num_seqs, max(lengths))
    decodes = {num_tokens: Decode(config, num_seqs, num_tokens) for num_tokens in lengths}
    print(json.dumps({"version": __version__}), flush=True)
    with message_queue() as (writer, reader):
        for line in sys.stdin:
            decode = decodes[int(line)]
            print(json.dumps([run_step(decode, writer, reader) for _ in range(num_steps)]), flush=True)


if __name__ == "__main__":
    main()
