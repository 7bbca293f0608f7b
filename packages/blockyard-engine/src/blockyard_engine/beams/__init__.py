"""Beam search: `hypotheses` that ended, one `search`, and many in one `batch`."""
