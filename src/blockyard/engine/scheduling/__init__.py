"""Who computes what, and when: no tensor comes near it."""
