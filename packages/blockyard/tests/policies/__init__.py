"""Who is evicted, and what may stay."""
