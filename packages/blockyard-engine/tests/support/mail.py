"""A transport between threads of one process: messages are copied and queued in order."""

from __future__ import annotations

import queue
from collections import defaultdict

import torch

from blockyard_engine.parallel import HandoffError
from blockyard_testing.patience import PATIENCE_SECONDS

Boxes = dict[tuple[int, int], "queue.Queue[torch.Tensor]"]


def new_boxes() -> Boxes:
    return defaultdict(queue.Queue)


class Mail:
    """One rank's end. spoil: damage an element of the next message that arrives."""

    def __init__(self, boxes: Boxes, rank: int) -> None:
        self.boxes, self.rank, self.spoil = boxes, rank, False

    def wait(self) -> None:
        pass

    def send(self, message: torch.Tensor, rank: int) -> Mail:
        assert message.is_contiguous()
        self.boxes[self.rank, rank].put(message.clone())
        return self

    def receive(self, message: torch.Tensor, rank: int) -> Mail:
        try:
            sent = self.boxes[rank, self.rank].get(timeout=PATIENCE_SECONDS)
        except queue.Empty:
            raise HandoffError(f"rank {rank} was silent") from None
        assert sent.shape == message.shape
        message.copy_(sent)
        if self.spoil:
            message[-1] += 1
            self.spoil = False
        return self
