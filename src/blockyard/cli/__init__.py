"""The `blockyard` command."""
