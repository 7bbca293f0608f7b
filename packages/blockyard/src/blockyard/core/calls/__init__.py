"""The public verbs, a file each."""
