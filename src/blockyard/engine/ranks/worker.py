"""The program of a process that rank 0 started: it is told what to load, and follows."""

from __future__ import annotations

import json
import os
import socket

import torch
import torch.distributed as dist

from ...sizing import Shard
from ..model import load_model
from .channel import Channel, ChannelClosed
from .follower import GONE, Follower, end_process


def main(descriptor: int) -> None:
    """Follow over the socket that was handed down as `descriptor`."""
    os.set_inheritable(descriptor, False)
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        _, body = channel.receive()
    except ChannelClosed:
        end_process("", 0)  # rank 0 gave up before it began
    start = json.loads(bytes(body))
    torch.set_num_threads(start["num_threads"])
    shard = Shard(start["rank"], start["size"])
    follower = Follower(channel, shard, dist.FileStore(start["store"], shard.size), end=_end)
    try:
        model, _ = load_model(start["path"], getattr(torch, start["dtype"]), start["device"])
    except BaseException as error:
        follower.fail(error)
    follower.run(model, start["block_size"], start["max_model_len"])


def _end(why: str) -> None:
    """End the process. What rank 0 had to say it says itself, unless it is gone."""
    end_process(why if why.endswith(GONE) else "")
