"""Beam search: one `search` with its hypotheses, and a `batch` of several."""
