"""What is remembered of what happened: history, residency, causes of misses."""
