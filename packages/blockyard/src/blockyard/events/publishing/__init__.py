"""From a cache to the wire: what it told, as numbered messages, from a thread of its own."""
