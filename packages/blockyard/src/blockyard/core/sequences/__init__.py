"""The running sequences: what is known of each, and who waits for whom."""
