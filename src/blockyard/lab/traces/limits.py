"""The largest of everything that a trace may hold. A value beyond is taken for damage, not for a request."""

from __future__ import annotations

#: Bytes of a line, compressed or not. A longer one is passed over in bounded memory.
MAX_LINE_BYTES = 64 * 2**20
#: Tokens of a prompt, and of an output; the longest sequence that a `CacheConfig` allows.
MAX_PROMPT_TOKENS = 2**27
MAX_OUTPUT_TOKENS = 2**27
#: Ids of blocks and of tokens.
MAX_HASH_ID = 2**60 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_HASH_BLOCK_SIZE = 4096
#: Timestamps in whatever unit the format has; below it a double is exact to the unit.
MAX_TIMESTAMP = 2**53
#: Requests that `max_requests` and the generators count to.
MAX_REQUESTS = 10**12
#: Lines that are looked at for one that says what format a file has.
DETECTION_LINES = 64
