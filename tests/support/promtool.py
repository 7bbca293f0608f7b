"""Debian's `promtool`, where it is installed: what Prometheus itself thinks of a page or of rules."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

#: Its remarks on names that are vLLM's, not ours: colons, and units.
_STYLE = re.compile(
    r"metric names should not contain ':'|no help text|should( not)? have \"_total\" suffix|use base unit"
)


def check_metrics(page: str) -> None:
    """A page of metrics parses, and `promtool` has nothing to say but of style. Nothing happens without it."""
    if shutil.which("promtool") is None:
        return
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, timeout=60)
    remarks = [line for line in done.stderr.splitlines() if line and not _STYLE.search(line)]
    assert remarks == [], remarks


def check_rules(path: Path) -> str:
    """What `promtool` says of a file of rules; it has no error."""
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
