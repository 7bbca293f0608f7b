"""The manager: sequences, their blocks, and every call on them."""
