"""KV events: the stream, its publisher, and the mirror that is rebuilt from the wire."""
