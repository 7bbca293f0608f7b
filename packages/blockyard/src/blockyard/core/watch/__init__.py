"""Records of past events: allocation history, residency, causes of misses."""
