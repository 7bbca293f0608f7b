"""`python -m benchmarks.handoff [--rounds N]`: a hand-over's bandwidth beside the transport's own, in the same run.

Two processes on one machine, joined by gloo. In each round the transport alone moves as many bytes from a tensor to a
tensor, each in one piece, in messages of 4 MiB with as many under way, and then each kind of transfer does. Least of
all rounds: the machine may be shared. First, what the control plane takes for a hand-over, without any bytes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blockyard import CacheConfig, KVCacheManager
from blockyard.storage import KVCache
from blockyard_engine.parallel import (
    HandoffReceiver,
    HandoffSender,
    HeadShards,
    Offer,
    PeerInfo,
    Transfer,
)
from blockyard_engine.parallel.runs import Lane
from blockyard_engine.parallel.tensors import KVPort
from blockyard_engine.parallel.transport import DistributedTransport, receive_lanes, send_lanes

MESSAGE_BYTES, DEPTH = 4 * 2**20, 4
#: Name: (layers, KV heads, head size, dtype, tokens).
MODELS: dict[str, tuple[int, int, int, torch.dtype, int]] = {
    "SmolLM2-135M, float32": (30, 3, 64, torch.float32, 2048),
    "Llama-3.1-8B, bfloat16": (32, 8, 128, torch.bfloat16, 2048),
}
#: Name: (sender's block size, receiver's, whether blocks lie in a row).
KINDS: dict[str, tuple[int, int, bool]] = {
    "blocks in a row": (16, 16, True),
    "blocks scattered": (16, 16, False),
    "block sizes 16 and 64": (16, 64, False),
}


def lane(tensors: KVCache, num_tokens: int, in_a_row: bool, whole: bool) -> Lane:
    """The one lane of a rank whose blocks lie in a row or anywhere."""
    size = tensors.block_size
    count = -(-num_tokens // size)
    ids = (
        np.arange(1, count + 1)
        if in_a_row
        else np.random.default_rng(1).permutation(tensors.num_blocks - 1)[:count] + 1
    )
    slots = (ids[:, None] * size + np.arange(size)).reshape(-1)[:num_tokens]
    return Lane(0, 0, tensors.num_kv_heads, 0, (slots,), (whole,))


def transport_alone(rank: int, memory: torch.Tensor) -> float:
    """Seconds in which the transport moves a flat tensor into another, and nothing else is done."""
    call = torch.distributed.isend if rank == 0 else torch.distributed.irecv
    under_way: deque[Any] = deque()
    torch.distributed.barrier()
    began = time.perf_counter()
    for message in memory.split(MESSAGE_BYTES):
        if len(under_way) == DEPTH:
            under_way.popleft().wait()
        under_way.append(call(message, 1 - rank))
    for work in under_way:
        work.wait()
    return time.perf_counter() - began


def handed_over(rank: int, port: KVPort, lanes: list[Lane]) -> float:
    torch.distributed.barrier()
    began = time.perf_counter()
    (send_lanes if rank == 0 else receive_lanes)(DistributedTransport(), port, lanes, [1 - rank])
    return time.perf_counter() - began


def run_rank(rank: int, rendezvous: str, rounds: int, told: Connection) -> None:
    """All rounds of one rank; the receiver's times count."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    for model, (layers, heads, size, dtype, num_tokens) in MODELS.items():
        times: dict[str, list[float]] = {"the transport alone": []}
        work = {}
        for kind, (from_size, to_size, in_a_row) in KINDS.items():
            block_size = (from_size, to_size)[rank]
            tensors = KVCache(2 * num_tokens // block_size, block_size, layers, heads, size, dtype=dtype)
            num_bytes = tensors.bytes_per_token * num_tokens
            work[kind] = (KVPort(tensors), [lane(tensors, num_tokens, in_a_row, from_size == to_size)])
            times[kind] = []
        memory = torch.zeros(num_bytes, dtype=torch.uint8)
        for _ in range(rounds + 1):
            times["the transport alone"].append(transport_alone(rank, memory))
            for kind, (port, lanes) in work.items():
                times[kind].append(handed_over(rank, port, lanes))
        if rank == 1:
            told.send((model, num_bytes, {kind: min(each[1:]) for kind, each in times.items()}))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def bandwidth(rounds: int) -> None:
    context = multiprocessing.get_context("spawn")
    heard, told = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = str(Path(folder) / "rendezvous")
        ranks = [context.Process(target=run_rank, args=(rank, rendezvous, rounds, told)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        told.close()
        try:
            for _ in MODELS:
                model, num_bytes, least = heard.recv()
                print(f"\n{model}: {num_bytes / 1e6:.0f} MB")
                alone = least["the transport alone"]
                for kind, seconds in least.items():
                    print(f"  {kind:<24} {num_bytes / seconds / 1e9:6.2f} GB/s  {alone / seconds:6.0%}")
        finally:
            for rank in ranks:
                rank.join(20)
                rank.kill()


def control_plane(rounds: int, num_tokens: int) -> None:
    """Microseconds of a hand-over, in bytes on the wire and calls of both sides."""
    config = CacheConfig(num_blocks=4096, max_model_len=16_384, watermark=0.0)
    shape: dict[str, Any] = {"dtype": "float32", "num_layers": 30, "head_size": 64, "shards": HeadShards.even(3)}
    peers = [PeerInfo.of(config, name, 1, **shape) for name in ("prefill", "decode")]
    prefill, decode = KVCacheManager(config), KVCacheManager(config)
    sender, receiver = HandoffSender(prefill, peers[0], 10), HandoffReceiver(decode, peers[1], 10)
    receiver.connect(peers[0])
    took = []
    for number in range(rounds):
        tokens = np.random.default_rng(number).integers(0, 100_000, num_tokens, dtype=np.int32)
        seq = prefill.allocate(tokens)
        prefill.reserve([seq])
        prefill.commit([seq], num_tokens, [1])
        began = time.perf_counter()
        message = sender.take_over(seq, number).to_bytes()
        offer = Offer.from_bytes(message)
        transfer = receiver.accept(offer, number)
        assert isinstance(transfer, Transfer)
        sender.require_held(offer.id, number)
        seq = receiver.finish(transfer, number)
        sender.release(offer.id)
        took.append(time.perf_counter() - began)
        decode.free(seq)
    print(f"control plane, {num_tokens} tokens: {min(took) * 1e6:.0f} us, offer of {len(message)} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    for num_tokens in (64, 2048, 16_000):
        control_plane(10 * rounds, num_tokens)
    bandwidth(rounds)


if __name__ == "__main__":
    main()
