"""`python -m tests.frame_rate`: how often the page draws in a headless Chromium, with a thousand to a million blocks.

A cache at work (`benchmarks.live`) in the main thread, the page's server in another, Chromium beside both. For each
size: frames that arrive a second, pictures that the browser draws a second while a path of blocks lights up, and
milliseconds of script for one picture of the map.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path

import uvicorn
from benchmarks.live import Load

from blockyard_serve.live import CallQueue, EngineStatus, LivePage
from blockyard_testing.browser import Browser, browser

MEASURE = """(async () => {
  const { map, frames } = blockyard, first = frames.latest.n, start = performance.now(), draws = [];
  const own = map.drawNow.bind(map);
  map.drawNow = () => { const from = performance.now(); own(); draws.push(performance.now() - from); };
  let pictures = 0, name = 0;
  while (performance.now() - start < MILLISECONDS) {
    if (pictures % 60 === 0) map.light({ name: `path ${name++}`, cells: [...Array(512).keys()] });
    await new Promise((done) => { requestAnimationFrame(done); });
    pictures++;
  }
  const seconds = (performance.now() - start) / 1000;
  draws.sort((one, other) => one - other);
  return [(frames.latest.n - first) / seconds, pictures / seconds, draws[draws.length >> 1], draws[draws.length - 1]];
})()"""


def measured(num_blocks: int, seconds: float, folder: Path) -> str:
    """A row of the table."""
    load = Load(num_blocks)
    calls = CallQueue(load.cache)
    config = uvicorn.Config(LivePage(calls), port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, daemon=True).start()
    found: list[list[float]] = []

    def look(page: Browser) -> None:
        until = time.monotonic() + 20
        while not server.started and time.monotonic() < until:
            time.sleep(0.05)
        port = server.servers[0].sockets[0].getsockname()[1]
        page.open(f"http://127.0.0.1:{port}/")
        page.wait("globalThis.blockyard && blockyard.frames.list.length > 1")
        found.append(page.evaluate(MEASURE.replace("MILLISECONDS", str(1000 * seconds))))

    with browser(folder) as page:
        looking = threading.Thread(target=look, args=(page,))
        looking.start()
        while looking.is_alive():
            calls.run(EngineStatus(step=load.num_steps))
            load.step()
            time.sleep(0.01)
    server.should_exit = True
    frames, pictures, median, most = found[0]
    return f"| {num_blocks:,} | {frames:.1f} | {pictures:.0f} | {median:.1f} ms | {most:.1f} ms |"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="of watching for each size")
    options = parser.parse_args()
    print("| blocks | frames that arrive/s | pictures/s | script for a picture, median | most |\n|---|---|---|---|---|")
    for num_blocks in (1_000, 10_000, 100_000, 1_000_000):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # Chromium may still write
            print(measured(num_blocks, options.seconds, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
