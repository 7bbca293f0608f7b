"""Policies that are a list, a few lists or a heap."""
