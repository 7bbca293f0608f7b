"""Waiting requests: an index of what each one lacks, and the order of admission."""
