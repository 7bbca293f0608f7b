"""Compiled tables of published contents, and of many workers' blocks."""
