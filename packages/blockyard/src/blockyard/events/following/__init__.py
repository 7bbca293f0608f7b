"""From the wire to an index: messages put in order, and what each worker has."""
