"""Jobs through an engine thread without a server, by a clock that moves with the steps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from blockyard_engine import Engine, SamplingParams, StepReport
from blockyard_engine.prompt_encoding import EncodedPrompt
from blockyard_serve import EngineThread
from blockyard_serve.jobs.job import Job, Mailbox
from blockyard_testing.servers import MODEL
from blockyard_testing.tiny_models import NUM_TOKENS


class SteppedClock:
    """Seconds since the test began."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def tick_each_step(self, engine: Engine, seconds: float) -> None:
        """From now on a step of the engine takes so long."""
        step = engine.step

        def slow_step(**options: Any) -> StepReport:
            self.now += seconds
            return step(**options)

        engine.step = slow_step  # type: ignore[method-assign]


def run_jobs(
    engine: Engine, prompts: Sequence[list[int]], sampling: SamplingParams, seconds_a_step: float = 1.0, **options: Any
) -> EngineThread:
    """Serve prompts, which arrive together, to their ends; every step takes so long and nothing else takes time.

    Returns the thread, which has ended. options: of `EngineThread`.
    """
    clock = SteppedClock()
    clock.tick_each_step(engine, seconds_a_step)
    all_are_there = threading.Event()
    thread = EngineThread(engine, 100, MODEL, clock=clock, **options)

    async def run_all() -> None:
        mailbox = Mailbox()
        jobs = [
            Job(EncodedPrompt(prompt, NUM_TOKENS), sampling, 0, number, mailbox, clock())
            for number, prompt in enumerate(prompts)
        ]
        thread.submit(jobs)
        all_are_there.set()
        while not all(job.is_over for job in jobs):
            await mailbox.take()

    thread.start()
    thread.call(lambda _: all_are_there.wait(60))  # or it would begin a step with the first of them
    try:
        asyncio.run(asyncio.wait_for(run_all(), 60))
    finally:
        assert thread.stop(60)
    return thread
