"""A headless Chromium driven through a pipe: a page opened, keys pressed, what it shows read, what it complained of.

It speaks the DevTools protocol over two file descriptors, so it needs no port and no further package.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_PATIENCE_SECONDS = 60.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--remote-debugging-pipe",
)
#: What a key is to the protocol, where its name is not its code.
_KEY_CODES = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36}
_KEY_CODES |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, " ": 32, ".": 190, ",": 188}


class Browser:
    """One page. `complaints` are errors and warnings of its console, of its security policy and of its network.

    requested: every address that it asked for.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._rest = b""
        self._number = 0
        self._session = ""
        self.complaints: list[str] = []
        self.requested: list[str] = []

    def open(self, address: str, width: int = 1280, height: int = 900, is_dark: bool = False, scale: float = 1) -> None:
        """Open the page and wait until it is loaded."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(width, height, scale)
        self.set_dark(is_dark)
        self.send("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        """The window, in CSS pixels. scale: device pixels for each."""
        options = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 620}
        self.send("Emulation.setDeviceMetricsOverride", **options)

    def set_dark(self, is_dark: bool) -> None:
        """Which colours the reader's system prefers."""
        value = "dark" if is_dark else "light"
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        options = {"returnByValue": True, "awaitPromise": True, "userGesture": True}
        answer = self.send("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = _PATIENCE_SECONDS) -> Any:
        """The value of an expression as soon as it is true."""
        until = time.monotonic() + seconds
        while not (found := self.evaluate(expression)):
            assert time.monotonic() < until, f"{expression} stayed {found!r}"
            time.sleep(0.05)
        return found

    def press(self, key: str, times: int = 1) -> None:
        """Press and release a key, as a keyboard does."""
        options: dict[str, Any] = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": _KEY_CODES.get(key, ord(key[0].upper())),
        }
        text = {"text": "\r" if key == "Enter" else key} if len(key) == 1 or key == "Enter" else {}
        for _ in range(times):
            self.send("Input.dispatchKeyEvent", type="keyDown", **options, **text)
            self.send("Input.dispatchKeyEvent", type="keyUp", **options)

    def write(self, text: str) -> None:
        """Type text into what has the focus."""
        self.send("Input.insertText", text=text)

    def point(self, x: float, y: float) -> None:
        """Move the pointer there, in CSS pixels of the window."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        """Click there."""
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, path: Path, is_whole: bool = False) -> None:
        """Write what is seen as PNG; is_whole: what is below the window too."""
        answer = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command; its result. What happens meanwhile is noted."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + _PATIENCE_SECONDS
        while True:
            found = self._read(until)
            if found.get("id") == self._number:
                assert "error" not in found, (method, found["error"])
                result: dict[str, Any] = found["result"]
                return result
            self._note(found.get("method", ""), found.get("params", {}))

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(told["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(told["args"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(str(told["entry"]))
        elif method == "Network.requestWillBeSent":
            self.requested.append(told["request"]["url"])

    def _read(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left = until - time.monotonic()
            assert left > 0, "the browser did not answer"
            if select.select([self._from], [], [], left)[0]:
                piece = os.read(self._from, 2**20)
                assert piece, "the browser has ended"
                self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


@contextmanager
def browser(folder: Path, *flags: str) -> Iterator[Browser]:
    """A browser with a profile of its own in `folder`, ended when the block is left. flags: more of Chromium's."""
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()

    def take_pipes() -> None:
        # The protocol is read from descriptor 3 and written to 4; neither may be overwritten before it is moved.
        high_read, high_write = (fcntl.fcntl(each, fcntl.F_DUPFD, 16) for each in (to_read, from_write))
        os.dup2(high_read, 3)
        os.dup2(high_write, 4)

    process = subprocess.Popen(
        [str(CHROMIUM), *_FLAGS, *flags, f"--user-data-dir={folder / 'profile'}", "about:blank"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        close_fds=False,
        preexec_fn=take_pipes,
    )
    os.close(to_read)
    os.close(from_write)
    driver = Browser(to_write, from_read)
    try:
        yield driver
    finally:
        process.terminate()
        try:
            process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(to_write)
        os.close(from_read)


@contextmanager
def asking(ask: Callable[[int, threading.Event], None], num_clients: int, timeout: float) -> Iterator[None]:
    """`ask(number, stop)` in as many threads, until the block is left: then `stop` is set, and each has `timeout` s."""
    stop = threading.Event()
    threads = [threading.Thread(target=ask, args=(number, stop)) for number in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout)
