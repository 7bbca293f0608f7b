"""The bar for long work: on a terminal, and nowhere else."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("rich")

from blockyard_testing.places import child_environment

WORK = """
from blockyard.progress import WorkBar
with WorkBar("sawing", 20, {shown}) as bar:
    for number in range(21):
        bar.update(number, f"{{number}} planks")
print("done")
"""
WITHOUT_RICH = "import sys\nsys.modules['rich'] = sys.modules['rich.console'] = None\n"


def drawn(program: str) -> str:
    """What a program writes to stderr, which is a terminal."""
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        environment = child_environment(TERM="xterm", COLUMNS="100")
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=theirs, env=environment, text=True
        )
        os.close(theirs)
        received = b""
        try:
            while piece := terminal.read(4096):
                received += piece
        except OSError:  # how a terminal says that its other end is closed
            pass
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "done\n")
    return received.decode()


def test_a_terminal_shows_how_far_the_work_is() -> None:
    shown = drawn(WORK.format(shown=True))
    for piece in ("sawing", "20/20", "20 planks", "left"):
        assert piece in shown


def test_a_bar_says_how_long_the_rest_takes() -> None:
    slow = (
        WORK.format(shown=True).replace("bar.update(", "time.sleep(0.1); bar.update(").replace("range(21)", "range(15)")
    )
    assert re.search(r"left 0:00:0[1-9]", strip(drawn("import time\n" + slow)))


def test_a_bar_without_a_total_does_not_guess() -> None:
    assert "left" not in drawn(WORK.format(shown=True).replace("20,", "0,"))


def strip(shown: str) -> str:
    """Without what a terminal takes as orders."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)


@pytest.mark.parametrize("program", [WORK.format(shown=False), WITHOUT_RICH + WORK.format(shown=True)])
def test_nothing_is_drawn_unasked_or_without_rich(program: str) -> None:
    assert drawn(program) == ""


def test_nothing_is_drawn_off_a_terminal() -> None:
    environment = child_environment()
    done = subprocess.run(
        [sys.executable, "-c", WORK.format(shown=True)], capture_output=True, text=True, env=environment, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
