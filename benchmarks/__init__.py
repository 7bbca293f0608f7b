"""Figures of the control plane: `make bench`. Medians of several rounds in one process; never a test."""
