"""What policies are made of: lists and heaps of blocks, memories of keys."""
