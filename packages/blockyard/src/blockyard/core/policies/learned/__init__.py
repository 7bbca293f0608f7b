"""Policies that learn which contents are used again."""
