"""Runs `blockyard` as a process, and as it is where torch is not installed."""

from __future__ import annotations

import subprocess
import sys

from .places import child_environment

WITHOUT_TORCH = (
    "import sys\n"
    "for name in ('torch', 'transformers', 'rich'): sys.modules[name] = None\n"
    "from blockyard.cli.main import main\n"
    "sys.exit(main(sys.argv[1:]))\n"
)


def run_without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments],
        capture_output=True,
        text=True,
        env=child_environment(),
        timeout=120,
    )


def sentence(text: str) -> str:
    """The one line that an error prints."""
    assert text.startswith("blockyard: ")
    assert text.count("\n") == 1, text
    return text
