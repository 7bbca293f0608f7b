"""Policies that learn which contents come back."""
