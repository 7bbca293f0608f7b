"""The README's Python runs as it stands there."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_there_are_snippets_to_run() -> None:
    assert len(SNIPPETS) >= 3


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet_runs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    snippet = SNIPPETS[number]
    if "path/to/" in snippet:
        compile(snippet, "README.md", "exec")
        return
    exec(compile(snippet, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    for shown in re.findall(r"print\(.*?\)\s+# (\[.*?\])$", snippet, flags=re.MULTILINE):
        assert shown in printed


def test_the_engine_loop_without_a_model_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(README.parent / "examples" / "engine_loop.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "1 forked with 1 blocks copied on write" in printed
    assert " 0 preempted" not in printed
    assert "0 blocks leaked" in printed
