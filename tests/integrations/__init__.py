"""Adapters for engines that exist, as far as they can be tested without the engine."""
