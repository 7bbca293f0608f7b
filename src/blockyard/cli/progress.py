"""A bar for long work, on stderr, where a person can see it."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class WorkBar:
    """How much of the work is done. Draws nothing off a terminal, or where rich is not installed.

    total: units of work; 0 where nobody knows.
    """

    def __init__(self, what: str, total: int, shown: bool = True) -> None:
        self._progress: Any = None
        if not shown or not sys.stderr.isatty():
            return
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        except ImportError:
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task(what, total=total or None)

    def __enter__(self) -> WorkBar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, num_done: int) -> None:
        """So many units are done."""
        if self._progress is not None:
            self._progress.update(self._task, completed=num_done)
