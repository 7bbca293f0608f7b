"""A bar for long work, on stderr, where a person can see it."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn


class GenerationBar:
    """How many requests are done, and how far the others are. Draws nothing if not `shown`, or off a terminal."""

    def __init__(self, num_requests: int, shown: bool) -> None:
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(
            *columns, console=console, transient=True, disable=not (shown and console.is_terminal)
        )
        self._task = self._progress.add_task("generating", total=num_requests, state="")

    def __enter__(self) -> GenerationBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, num_finished: int, num_running: int, num_waiting: int, num_tokens: int) -> None:
        """Show the state after a step; num_tokens counts the new tokens so far."""
        state = f"{num_running} running, {num_waiting} waiting, {num_tokens} tokens"
        self._progress.update(self._task, completed=num_finished, state=state)
