"""The public calls of a cache, a file each."""
