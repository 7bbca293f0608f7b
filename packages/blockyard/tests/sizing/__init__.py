"""How much memory models need."""
