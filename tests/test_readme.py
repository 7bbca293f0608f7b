"""The Python in the README and in the guides runs as it stands there."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"
#: The documents whose Python is run, and the least number of snippets in each.
DOCUMENTS = {README: 3, README.parent / "docs" / "sizing.md": 3}


def snippets(document: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", document.read_text(), flags=re.DOTALL)


SNIPPETS = [(document, number) for document in DOCUMENTS for number in range(len(snippets(document)))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_there_are_snippets_to_run(document: Path) -> None:
    assert len(snippets(document)) >= DOCUMENTS[document]


@pytest.mark.parametrize(("document", "number"), SNIPPETS, ids=[f"{d.name}-{n}" for d, n in SNIPPETS])
def test_a_snippet_runs(document: Path, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    snippet = snippets(document)[number]
    if "path/to/" in snippet:
        compile(snippet, document.name, "exec")
        return
    exec(compile(snippet, document.name, "exec"), {})
    printed = capsys.readouterr().out
    for shown in re.findall(r"print\(.*?\)\s+# (\[.*?\])$", snippet, flags=re.MULTILINE):
        assert shown in printed


def test_the_engine_loop_without_a_model_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(README.parent / "examples" / "engine_loop.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "1 forked with 1 blocks copied on write" in printed
    assert " 0 preempted" not in printed
    assert "0 blocks leaked" in printed
