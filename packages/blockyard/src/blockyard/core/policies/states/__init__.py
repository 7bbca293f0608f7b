"""These rules say at which boundaries of a prompt a state is kept, and which goes first."""
