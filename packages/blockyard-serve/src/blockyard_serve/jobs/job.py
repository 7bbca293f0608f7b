"""What goes to the engine thread and what comes back: a job for each prompt, a mailbox for each client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from blockyard.keys import ExtraKey
from blockyard_engine import GenerationResult, NewToken, SamplingParams
from blockyard_engine.prompt_encoding import EncodedPrompt

from ..errors import ApiError

#: What becomes of a job: a token, its end, or an error that ends it.
Event = NewToken | GenerationResult | ApiError


class Mailbox:
    """Events for one coroutine, from the engine thread. It grows no further than the answer it carries."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

    def put(self, position: int, event: Event) -> None:
        """Leave an event of the job at `position`; only in the loop's thread."""
        self._queue.put_nowait((position, event))

    async def take(self) -> list[tuple[int, Event]]:
        """Everything that lies here; waits until something does."""
        events = [await self._queue.get()]
        while not self._queue.empty():
            events.append(self._queue.get_nowait())
        return events


@dataclass(eq=False, slots=True)
class Job:
    """Is one prompt on its way. Only who runs it writes the fields after `resumes`.

    position: which prompt of the client's request. extra_keys: it shares blocks only under the same ones. name: of that
    request, in the log. parent: the client's span. arrived_at: when the request did, in seconds of `time.perf_counter`.
    session: whose turn it is, by the engine's name. given: the first tokens of its answer, chosen elsewhere. resumes:
    whether it may go on elsewhere if its engine is lost. tenant: whose it is, by number. started_at: when the first
    step began that computed something of it. first_token_at, last_token_at: when the first token of all came, and the
    last of each completion.
    """

    prompt: EncodedPrompt
    sampling: SamplingParams
    priority: int
    position: int
    mailbox: Mailbox
    arrived_at: float
    extra_keys: tuple[ExtraKey, ...] = ()
    name: str = ""
    parent: Any = None
    session: str | None = None
    given: Sequence[int] = ()
    resumes: bool = True
    tenant: int = 0
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: dict[int, float] = field(default_factory=dict)
    request_id: int | None = None
    is_over: bool = False

    @property
    def num_completions(self) -> int:
        """The places it takes in the queue."""
        return self.sampling.n


class ParentReader(Protocol):
    """Reads the caller's span from a request's headers, for `Job.parent`."""

    def context_of(self, headers: Mapping[str, str]) -> Any:
        """Return it. O(headers)."""


class JobRunner(Protocol):
    """Runs jobs: is the thread of an engine, or a fleet of them. A job's events go to its mailbox."""

    @property
    def tracer(self) -> ParentReader | None:
        """Return what reads the parents of spans, None where nothing is traced."""

    @property
    def refusal(self) -> str | None:
        """Say why no job is taken at all; None while it serves."""

    def start(self) -> None:
        """Begin to serve."""

    def ask_ranks(self) -> str | None:
        """Return `refusal`, after a look at all that serves; it may wait for seconds."""

    def require_place(self, num_completions: int = 1) -> None:
        """Raise `ApiError` (429, 503) if that many would not be taken now."""

    def submit(self, jobs: list[Job]) -> None:
        """Take the jobs of one client, all or none. Raises `ApiError` (429, 503) if there is no place."""

    def cancel(self, jobs: Iterable[Job]) -> None:
        """End jobs whose client is gone, if they still wait or run."""

    def refuse(self, why: str) -> None:
        """Take no more jobs; those that wait or run go on."""

    def end_all(self, error: ApiError) -> None:
        """End every job with an error."""

    def stop(self, timeout: float) -> bool:
        """End all; False if it did not end in time."""
