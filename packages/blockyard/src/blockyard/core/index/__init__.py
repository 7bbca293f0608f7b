"""The exact prefix index: from the tokens of a prompt to blocks."""
