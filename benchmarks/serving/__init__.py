"""A server under load: many streaming clients, some of which vanish, and what shared prefixes are worth to them."""
