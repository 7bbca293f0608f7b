"""Traces, and what the lab computes from them."""
