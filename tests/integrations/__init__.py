"""Adapters for engines that people run. What needs such an engine's own package or sources is in `interop`."""
