"""The public pool classes: leases for all of them, then pools by tokens and by names."""
