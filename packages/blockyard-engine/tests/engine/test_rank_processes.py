"""Ranks as processes: the real model's tokens, kill -9 of each of them, and no leftovers."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from blockyard_engine import Engine, ModelError, RankError, SamplingParams, StepReport
from blockyard_engine.ranks import group, leader, watch
from blockyard_engine.ranks.peers import StartedPeers
from blockyard_testing.patience import PATIENCE_SECONDS
from blockyard_testing.places import child_environment
from blockyard_testing.rank_loop import RankLoop, children, is_alive
from blockyard_testing.tiny_models import (
    demo_model_or_skip,
    mixed_prompts,
    reference_tokens,
    tiny_model,
    tokens_of,
)

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it looks at /proc")


def own_children(others: list[int]) -> list[int]:
    """Return this process's children, except those that earlier tests left (pools, trackers)."""
    return [child for child in children(os.getpid()) if child not in others]


@pytest.fixture
def others() -> list[int]:
    return children(os.getpid())


def require_gone(pids: list[int], seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.01)


def require_ended(pid: int) -> None:
    """Wait until a child has ended, without taking its status."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.drawn
def test_when_one_of_three_ranks_ends_all_end(others: list[int]) -> None:
    model = tiny_model("smollm2")
    prompts = mixed_prompts((5, 17, 33))
    engine = Engine(model, num_blocks=40, tensor_parallel=3)
    pids = own_children(others)
    assert len(pids) == 2
    assert engine.kv_cache.kv_heads == range(1)
    assert tokens_of(engine.generate(prompts, SamplingParams(max_tokens=6))) == reference_tokens(model, prompts, 6)

    def kill(_: StepReport) -> None:
        os.kill(pids[1], signal.SIGKILL)

    message = re.escape(f"rank 2 (process {pids[1]}) was killed by SIGKILL")
    with pytest.raises(RankError, match=message):
        engine.generate(prompts, SamplingParams(max_tokens=100), on_step=kill)
    with pytest.raises(RankError, match=message):
        engine.generate(prompts)
    engine.cache.check()
    assert engine.cache.num_used_blocks == 0
    engine.close()
    assert own_children(others) == []
    engine.close()


@pytest.mark.drawn
def test_a_stopped_rank_is_named(others: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The error used to be that of the failed collective, without the rank."""
    monkeypatch.setattr(group, "STEP_SECONDS", 3)
    monkeypatch.setattr(watch, "_ANSWER_SECONDS", 1.0)
    model = tiny_model("smollm2")
    engine = Engine(model, num_blocks=40, tensor_parallel=3)
    pids = own_children(others)

    def stop(_: StepReport) -> None:
        os.kill(pids[1], signal.SIGSTOP)

    with pytest.raises(RankError) as caught:
        engine.generate(mixed_prompts((5, 17, 33)), SamplingParams(max_tokens=100), on_step=stop)
    expected = f"rank 2 (process {pids[1]}) does not answer: it is stopped or cut off"
    assert str(caught.value) == engine.rank_failure == expected
    engine.cache.check()
    engine.close()
    assert own_children(others) == [], "a stopped process is ended too"


def test_an_interruption_in_a_step_ends_the_ranks(others: list[int]) -> None:
    model = tiny_model("smollm2")
    prompts = mixed_prompts((5, 17, 33))
    engine = Engine(model, num_blocks=40, tensor_parallel=2)
    pids = own_children(others)
    assert tokens_of(engine.generate(prompts, SamplingParams(max_tokens=6))) == reference_tokens(model, prompts, 6)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    engine._patched.model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts)
    assert engine.rank_failure == "a step failed on rank 0: KeyboardInterrupt: KeyboardInterrupt"
    engine.cache.check()
    assert engine.cache.num_used_blocks == 0
    require_gone(pids)


def test_two_processes_share_tokens(others: list[int]) -> None:
    model = tiny_model("smollm2")
    prompts = mixed_prompts((5, 17, 33))
    engine = Engine(model, num_blocks=40, block_size=8, context_parallel=2, context_interleave=4)
    pids = own_children(others)
    assert len(pids) == 1
    assert (engine.cache.block_size, engine.kv_cache.block_size) == (16, 8)
    assert tokens_of(engine.generate(prompts, SamplingParams(max_tokens=6))) == reference_tokens(model, prompts, 6)
    engine.close()
    require_gone(pids)


@pytest.mark.drawn
def test_another_ranks_load_error_is_reported_and_a_refused_model_leaves_no_process(
    others: list[int], tmp_path: Path
) -> None:
    peers = StartedPeers(2, tmp_path)
    with pytest.raises(RankError, match=f"rank 1 {tmp_path} has no config.json"):
        Engine(tiny_model("llama-mqa"), num_blocks=40, tensor_parallel=peers)
    assert own_children(others) == []
    with pytest.raises((ModelError, RankError), match="has no base_model_tp_plan"):
        Engine(tiny_model("gpt-oss"), num_blocks=40, tensor_parallel=2)
    assert own_children(others) == []


def test_a_rank_killed_before_its_start_message_is_named(others: list[int]) -> None:
    """kill -9 while it imports: sending the start message fails, and the error is that of any other death."""

    class Killing(StartedPeers):
        @property
        def _store_path(self) -> str:  # asked for when the processes have started, before they are told
            (child,) = own_children(others)
            os.kill(child, signal.SIGKILL)
            require_ended(child)
            return super()._store_path

    with pytest.raises(RankError, match=r"^rank 1 \(process \d+\) was killed by SIGKILL$"):
        Engine(tiny_model("llama-mqa"), num_blocks=40, tensor_parallel=Killing(2))
    assert own_children(others) == []


@pytest.mark.drawn
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("is_killed", [True, False])
def test_a_rank_that_fails_before_joining_is_reported(
    others: list[int], monkeypatch: pytest.MonkeyPatch, size: int, is_killed: bool
) -> None:
    """Killed, or without descriptors for sockets: rank 0 used to wait in torch's rendezvous for `STEP_SECONDS`."""

    def stop(_: Any) -> bool:  # when all have said hello, and before they are welcome
        pid = own_children(others)[-1]
        if is_killed:
            os.kill(pid, signal.SIGSTOP)
        else:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, 0))
        return False

    class Failing(StartedPeers):
        def store(self) -> Any:  # when they are welcome
            if is_killed:
                os.kill(own_children(others)[-1], signal.SIGKILL)  # stopped until then: it met nobody
            return super().store()

    monkeypatch.setattr(leader, "is_affordable", stop)
    why = r"\(process \d+\) was killed by SIGKILL" if is_killed else r"could not meet the other ranks: \w"
    began = time.monotonic()
    with pytest.raises(RankError, match=f"^rank {size - 1} {why}"):
        Engine(tiny_model("smollm2"), num_blocks=40, tensor_parallel=Failing(size))
    assert time.monotonic() - began < min(PATIENCE_SECONDS, group.STEP_SECONDS)
    assert own_children(others) == []


@pytest.mark.drawn
def test_ranks_end_when_rank_0_is_killed() -> None:
    loop = RankLoop(2)
    pids = loop.wait_for_ranks()
    loop.wait_for_steps(20)
    os.kill(loop.process.pid, signal.SIGKILL)
    assert loop.end_of(pids) == (-signal.SIGKILL, ["blockyard: rank 1 ends: rank 0 has ended"])


@pytest.mark.drawn
def test_torchrun_starts_the_ranks_of_a_command() -> None:
    demo_model_or_skip()
    command = ["-m", "blockyard", "generate", "The capital of France is", "--max-tokens", "3", "--num-blocks", "40"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2", *command],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=child_environment(OMP_NUM_THREADS="1"),
        stdin=subprocess.DEVNULL,
    )
    assert (done.returncode, done.stdout) == (0, " Paris.\n\n"), done.stderr


def test_a_rank_writes_its_last_sentence_at_once() -> None:
    """Also without buffering, so the sentences of ranks that end at once stay on separate lines."""
    program = "from blockyard_engine.ranks.follower import end_process\nend_process('rank 1 ends')"
    environment = {**child_environment(), "PYTHONUNBUFFERED": "1"}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps writes apart
    with ours:
        with theirs:
            subprocess.run([sys.executable, "-W", "ignore", "-c", program], stderr=theirs, env=environment, check=False)
        assert ours.recv(1000) == b"blockyard: rank 1 ends\n"
