"""The running sequences: their rows, open steps, and waits for shared prefixes."""
