"""Long work draws a bar on stderr, where that is a terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class WorkBar:
    """How much of the work is done, and about how long the rest takes.

    Draws nothing if not `shown`, off a terminal, or where rich is not installed.

    what: in one word. total: units of work; 0 where it is not known.
    """

    def __init__(self, what: str, total: int, shown: bool = True) -> None:
        self._progress: Any = None
        if not shown or not sys.stderr.isatty():
            return
        try:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )
        except ImportError:
            return
        texts = TextColumn("{task.description}"), TextColumn("{task.fields[state]}")
        times = TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
        columns = (texts[0], BarColumn(), MofNCompleteColumn(), texts[1], *(times if total else times[:1]))
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task(what, total=total or None, state="")

    def __enter__(self) -> WorkBar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, num_done: int, state: str = "") -> None:
        """`num_done` units are done. state: what else there is to say, behind the bar."""
        if self._progress is not None:
            self._progress.update(self._task, completed=num_done, state=state)
