"""This package is the `blockyard` command."""
