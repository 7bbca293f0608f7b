"""Progress bars on stderr, drawn only if it is a terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class WorkBar:
    """Progress bar with the remaining time.

    It is not drawn if `shown` is false, stderr is not a terminal, or rich is not installed.

    Args:
        what: label, one word.
        total: units of work; 0 if unknown.
        shown: whether to draw at all.
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
        """Set the units done so far, and the text after the bar."""
        if self._progress is not None:
            self._progress.update(self._task, completed=num_done, state=state)
