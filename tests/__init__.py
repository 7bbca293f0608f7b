"""Blockyard's tests; a package, so that `python -m tests.stress` runs from the repository's root."""
