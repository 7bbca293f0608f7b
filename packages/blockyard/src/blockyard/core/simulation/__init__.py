"""Loops over whole traces, compiled. They know integers: no file, no request."""
