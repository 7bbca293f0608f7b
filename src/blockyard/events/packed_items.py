"""How many items some msgpack has, told before any of them is made."""

from __future__ import annotations

#: By tag, the bytes of what begins with it: its own, and for text and the like those that say how many follow.
_OWN = {0xC4: 2, 0xC5: 3, 0xC6: 5, 0xC7: 3, 0xC8: 4, 0xC9: 6, 0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}
_OWN |= {0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9, 0xD4: 3, 0xD5: 4, 0xD6: 6, 0xD7: 10, 0xD8: 18}
_OWN |= {0xD9: 2, 0xDA: 3, 0xDB: 5, 0xDC: 3, 0xDD: 5, 0xDE: 3, 0xDF: 5}
_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}


def has_more_items(packed: bytes, limit: int) -> bool:
    """Whether well-formed msgpack has more than `limit` items, lists and maps among them. O(items, at most limit)."""
    at = count = 0
    while at < len(packed) and count <= limit:
        tag = packed[at]
        length = packed[at + 1 : at + 1 + _LENGTHS.get(tag, 0)]
        at += _OWN.get(tag, 1) + int.from_bytes(length, "big") + (tag & 31 if tag & 0xE0 == 0xA0 else 0)
        count += 1
    return count > limit
