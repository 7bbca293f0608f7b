"""What can be seen of a cache."""
