"""Publishing the contents of a cache as KV events."""
