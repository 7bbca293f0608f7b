"""Other block managers, measured as ours is: `python -m benchmarks.peers` (docs/peers.md)."""
