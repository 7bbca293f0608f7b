"""Following KV events: putting messages in order, and an index of each worker's contents."""
