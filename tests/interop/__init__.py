"""Blockyard beside other systems' own programs, unmodified: `make interop` installs and runs them."""
