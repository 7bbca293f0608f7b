"""What many caches hold, as one trie of blocks: compiled, arrays alone."""
