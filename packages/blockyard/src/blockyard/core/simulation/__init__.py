"""Compiled loops over whole traces. They take integers: no files, no request objects."""
