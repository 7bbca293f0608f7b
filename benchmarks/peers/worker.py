"""`python -m benchmarks.peers.worker NAME FOLDER`: measure one manager, a JSON object a line."""

from __future__ import annotations

import argparse
import importlib
import json
from dataclasses import asdict
from pathlib import Path

from .measuring import peer_rows

#: Where each manager's adapter is.
PEERS = {"vllm": "VLLM", "sglang": "SGLang", "nano": "NanoLike"}


def main() -> None:
    """The version first, then the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(PEERS))
    parser.add_argument("folder", type=Path, help="the trace, and the orders in which it left free blocks")
    args = parser.parse_args()
    peer = getattr(importlib.import_module(f".{args.name}", __package__), PEERS[args.name])()
    print(json.dumps({"version": peer.version()}), flush=True)
    for row in peer_rows(peer, args.folder):
        print(json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    main()
