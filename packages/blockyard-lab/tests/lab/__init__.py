"""Traces, and what is found out with them."""
