"""The engine's side of the page: its cache is asked between two steps, and requests have their clients' names."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ...core.manager import KVCacheManager
from ...engine import Engine, GenerationResult
from ...live import Surroundings
from ...live.prompts import PromptLog
from .engine_thread import EngineThread
from .job import Job

AnswerT = TypeVar("AnswerT")


class EngineSource:
    """The cache of an engine thread, as `blockyard.live` asks it. shows_names: the X-Request-ID of clients too."""

    def __init__(self, thread: EngineThread, shows_names: bool = True) -> None:
        self._thread = thread
        self._shows_names = shows_names

    def ask(self, question: Callable[[KVCacheManager, Surroundings], AnswerT]) -> Future[AnswerT]:
        """See `blockyard.live.Source`; the future has `ApiError` where the thread has ended."""
        return self._thread.ask(lambda engine: question(engine.cache, self._around(engine)))

    def _around(self, engine: Engine) -> Surroundings:
        names = self._names() if self._shows_names else {}
        step, preemptions = self._thread.num_steps, engine.num_preemptions
        return Surroundings(step, engine.num_running, engine.num_waiting, preemptions, names, engine.loading_blocks)

    def _names(self) -> dict[str, str]:
        """By holders, as the engine's scheduler writes them. O(completions)."""
        names = {}
        for request_id, (name, num_completions) in self._thread.job_names().items():
            names[f"request {request_id}"] = name
            for index in range(1, num_completions):
                names[f"request {request_id}, completion {index}"] = f"{name}, completion {index}"
        return names


def note_prompts(thread: EngineThread, prompts: PromptLog) -> None:
    """From now on, note the prompt of each job that comes to its end, with the name its client gave it."""

    def note(job: Job, result: GenerationResult) -> None:
        prompts.note(job.prompt.token_ids, result.num_cached_tokens, job.extra_keys, job.name)

    thread.on_result = note
