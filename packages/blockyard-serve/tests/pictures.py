"""`python -m tests.pictures FOLDER`: the pictures of docs/page.md, taken in a headless Chromium of a server under load.

The demo model answers clients that share beginnings, one of them the page's own chat box. Look at what was written
before it goes into docs/images.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path

from blockyard_engine import Engine
from blockyard_engine.model import demo_model_path
from blockyard_testing.browser import Browser, asking, browser
from blockyard_testing.servers import Running, running_server

DESK, PHONE = (1440, 960), (390, 844)
#: Beginnings that clients share: rules of a house, long enough for many blocks.
HOUSES = tuple(
    f"You answer the customers of {house}. " + " ".join(f"Rule {n}: {rule}" for n, rule in enumerate(RULES, 1))
    for house in ("a post office", "a library", "a small railway")
    for RULES in [("be short.", "be kind.", "never guess a price.", "name the counter that helps.") * 4]
)
QUESTIONS = (
    "When do you open on Saturday?",
    "I have lost my ticket. What now?",
    "Can my daughter, who is nine, come alone?",
    "How do I complain about a delay?",
)
NAME = "SmolLM2-135M-Instruct"
CLIENTS = 6
ASKED = "How much does it cost to send a parcel abroad?"


def clients(server: Running) -> AbstractContextManager[None]:
    """Clients that talk, turn after turn, until the block is left."""

    def talk(number: int, stop: threading.Event) -> None:
        turn = 0
        while not stop.is_set():
            told = [{"role": "system", "content": HOUSES[number % len(HOUSES)]}]
            for question in range(1 + turn % 3):
                told.append({"role": "user", "content": QUESTIONS[(number + question) % len(QUESTIONS)]})
                answer = (
                    server.client()
                    .with_options(timeout=600)
                    .chat.completions.create(model=NAME, messages=told, max_tokens=10, temperature=0.7, seed=turn)
                )
                told.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
                if stop.is_set():
                    return
            turn += 1

    return asking(talk, CLIENTS, timeout=120)


def open_page(page: Browser, server: Running, size: tuple[int, int], is_dark: bool, scale: float) -> None:
    page.open(f"{server.address}/ui/", *size, is_dark=is_dark, scale=scale)
    page.wait("globalThis.blockyard && blockyard.frames.list.length > 2")


def ask(page: Browser) -> None:
    """The page's own prompt, and some of its answer."""
    page.evaluate("document.getElementById('question').focus()")
    page.write(ASKED)
    page.evaluate("document.getElementById('send').click()")
    page.wait("document.getElementById('talk').children.length > 1", 60)


def take(server: Running, page: Browser, folder: Path, seconds: float) -> None:
    """All three, one after another."""
    open_page(page, server, DESK, is_dark=False, scale=1)
    time.sleep(seconds)
    ask(page)
    time.sleep(2)
    page.picture(folder / "page-light.png")
    page.set_dark(True)
    page.evaluate("document.querySelector('#rows button').focus()")
    time.sleep(2)
    page.picture(folder / "page-dark.png")
    page.set_dark(False)
    page.resize(*PHONE, scale=2)
    time.sleep(2)
    page.picture(folder / "page-phone.png")
    assert page.complaints == [], page.complaints


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(prog="tests.pictures", description=main.__doc__)
    parser.add_argument("folder", type=Path, help="where page-light.png, page-dark.png and page-phone.png are written")
    parser.add_argument("--seconds", type=float, default=60.0, help="of load before the first one; default: 60")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    engine = Engine.from_pretrained(
        demo_model_path(), num_blocks=72, max_num_seqs=8, cache_options={"track_misses": True}
    )
    with (
        tempfile.TemporaryDirectory() as profile,
        running_server(engine, model_name=NAME) as server,
        browser(Path(profile)) as page,
        clients(server),
    ):
        take(server, page, options.folder, options.seconds)


if __name__ == "__main__":
    main()
