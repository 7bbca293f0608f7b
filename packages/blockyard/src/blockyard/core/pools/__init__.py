"""The public faces of pools: leases for all of them, then what knows tokens, and what knows names."""
