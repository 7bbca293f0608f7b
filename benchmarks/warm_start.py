"""The first token of a known prompt after `kill -9`, beside computing it: real processes, the demo model, a folder.

    python -m benchmarks.warm_start [--tokens 4000] [--lives 3]

A server with `--tier file:FOLDER` gets a prompt of random tokens and computes it; when all of it is stored it is
killed, and started again, as often as `--lives` says, and asked the same. Seconds are from sending the request to the
first token, at the client; the answers must be equal. Nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request


def start(folder: str) -> tuple[subprocess.Popen[str], str]:
    """Start a server; returns its process and address."""
    options = ["serve", "--port", "0", "--ui", "off", "--tier", f"file:{folder},bytes=20GiB"]
    process = subprocess.Popen(
        [sys.executable, "-m", "blockyard", *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().split()[-1].removesuffix("/v1")


def ask(address: str, prompt: list[int]) -> tuple[float, str]:
    """Returns the seconds to the first token, and the text."""
    fields = {"model": "SmolLM2-135M-Instruct", "prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/completions", json.dumps(fields).encode(), headers)
    begun, first, text = time.perf_counter(), 0.0, ""
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - begun
                text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
    return first, text


def figure(address: str, name: str) -> float:
    """Returns a figure of the server's metrics, summed over labels."""
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        page = answer.read().decode()
    return sum(float(value) for value in re.findall(rf"^{name}\{{.*\}} (\S+)$", page, re.MULTILINE))


def main() -> None:
    """Print a line for each life of the server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--lives", type=int, default=3)
    options = parser.parse_args()
    choose = random.Random(1)
    prompt = [choose.randrange(1000, 40000) for _ in range(options.tokens)]
    told = set()
    computed = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for life in range(options.lives):
            process, address = start(folder)
            try:
                seconds, text = ask(address, prompt)
                told.add(text)
                computed = computed or seconds
                hit = int(figure(address, "blockyard:tier_hit_tokens_total"))
                print(
                    f"life {life}: {hit} tokens hit, first token {seconds:.2f} s, {computed / seconds:.0f} times sooner"
                )
                while life == 0 and figure(address, "blockyard:tier_objects") < options.tokens // 16:
                    time.sleep(0.1)
            finally:
                process.kill()
                process.wait()
    assert len(told) == 1, "the answers differ"


if __name__ == "__main__":
    main()
