"""Blocks: who holds them, which are free, who goes next."""
