"""Two engines and their links in one process; a thread answers for the sender."""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

from blockyard_engine import Engine, SamplingParams
from blockyard_engine.handoff import DecodeConnector, PrefillConnector
from blockyard_engine.parallel import Offer, Transfer
from blockyard_engine.parallel.link import ReceiverLink, SenderLink
from blockyard_testing.hybrid_models import HYBRIDS, hybrid_model, poisoned
from blockyard_testing.patience import PATIENCE_SECONDS
from blockyard_testing.tiny_models import tiny_model

from .mail import Mail, new_boxes


def load_engine(name: str = "llama-gqa", changes: dict[str, Any] | None = None, **options: Any) -> Engine:
    """Return an engine for the hybrid model `name`, with changes to its config."""
    if name in HYBRIDS:
        given = {"num_blocks": 1800, "block_size": 4, "max_num_seqs": 8, **options}
        return poisoned(Engine(hybrid_model(name, **(changes or {})), **given))
    return Engine(tiny_model(name), **{"num_blocks": 60, "block_size": 4, "max_num_seqs": 8, **options})


class Ends:
    """A prefilling and a decoding engine with their links; a thread answers for the sender."""

    def __init__(self, name: str = "llama-gqa", **options: Any) -> None:
        self.prefill = PrefillConnector(load_engine(name), "prefill", 1, 10)
        self.decode = DecodeConnector(load_engine(name, **{"block_size": 8, **options}), "decode", 1, 10)
        boxes, ends = new_boxes(), Pipe()
        self.mail = Mail(boxes, 1)
        self.connections = ends
        common: dict[str, Any] = {"checked": True, "timeout": PATIENCE_SECONDS}

        def make_sender() -> None:
            self.sender = SenderLink(self.prefill.sender, self.prefill.port, Mail(boxes, 0), ends[0], [1], **common)

        with Beside(make_sender):
            self.receiver = ReceiverLink(self.decode.receiver, self.decode.port, self.mail, ends[1], [0], **common)

    def compute(self, prompts: list[list[int]], sampling: SamplingParams, now: float = 0) -> list[Any]:
        """Compute and offer all prompts; return requests that ended with their first token."""
        for prompt in prompts:
            self.prefill.add_request(prompt, sampling)
        ended = []
        while self.prefill.engine.has_unfinished:
            computed, finished = self.prefill.step(now)
            ended += finished
            for each in computed:
                self.sender.offer(each.offer)
        return ended

    def take(self, offer: Offer, sampling: SamplingParams, now: float = 0) -> Any:
        transfer = self.decode.accept(offer, sampling, now)
        assert isinstance(transfer, Transfer)
        return transfer, self.fetch(transfer, now)

    def fetch(self, transfer: Transfer, now: float = 0) -> Any:
        """Fetch and finish a transfer; return its first token."""
        done = threading.Event()

        def serve() -> None:
            while not done.is_set():
                self.sender.serve(now, 0.02)

        with Beside(serve):
            self.receiver.fetch(transfer)
            done.set()
        token = self.decode.finish(transfer, now)
        self.receiver.release(transfer.offer.id)
        return token

    def require_empty(self) -> None:
        for connector in (self.prefill, self.decode):
            connector.engine.cache.check()
            assert connector.engine.cache.leak_report() == []


class Beside:
    """Runs a function in a thread during the block; its error is raised at the end."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.errors: list[BaseException] = []

        def caught() -> None:
            try:
                run()
            except BaseException as error:
                self.errors.append(error)

        self.thread = threading.Thread(target=caught, daemon=True)

    def __enter__(self) -> Beside:
        self.thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.thread.join(PATIENCE_SECONDS)
        assert not self.thread.is_alive()
        if self.errors and raised[0] is None:
            raise self.errors[0]
