"""Larger arrays for an index, allocated before anything changes, so that growing is all or nothing."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...ids import NO_CONTENT
from ..arrays import grown_i32, grown_i64, words_to_cache_line, zeros_i64
from .content_log import ContentLog
from .continuations import Continuations

#: A slot of the table has a block id in its low 27 bits and the top 35 bits of the chained hash above them, so most
#: probes need not read the block.
ID_BITS: Final[i64] = 27
ID_MASK: Final[i64] = 134217727
ID_SPAN: Final[i64] = 134217728
TAG_BITS: Final = 35


class IndexRoom:
    """Arrays for an index of `num_blocks` blocks, filled from a smaller one; `PrefixIndex.move_into` installs them."""

    def __init__(self, num_blocks: int, num_words: int) -> None:
        self.num_blocks: i64 = num_blocks
        self.words = zeros_i64(num_blocks * num_words + 8)
        self.first_word: i64 = words_to_cache_line(self.words)
        bits = bits_for(2 * num_blocks)
        self.slots = zeros_i64(2**bits)
        self.home_shift: i64 = TAG_BITS - bits
        self.identity = zeros_i64(0)
        self.chain_hash = zeros_i64(0)
        self.owner = vec[i32]([])
        self.next_equal = vec[i32]([])
        self.prev_equal = vec[i32]([])
        self.continuations: Continuations | None = None
        self.log: ContentLog | None = None

    def take_words(self, words: vec[i64], first: i64, count: i64) -> None:
        """Copy `count` words of stored tokens."""
        for word in range(count):
            self.words[self.first_word + word] = words[first + word]

    def take_blocks(self, identity: vec[i64], chain_hash: vec[i64], owner: vec[i32]) -> None:
        """Copy the identity, hash and owner of each block."""
        self.identity = grown_i64(identity, int(2 * self.num_blocks))
        self.chain_hash = grown_i64(chain_hash, int(self.num_blocks))
        self.owner = grown_i32(owner, int(self.num_blocks))

    def take_rings(self, next_equal: vec[i32], prev_equal: vec[i32]) -> None:
        """Copy the rings of duplicates."""
        self.next_equal = grown_i32(next_equal, int(self.num_blocks))
        self.prev_equal = grown_i32(prev_equal, int(self.num_blocks))

    def take_slots(self, slots: vec[i64]) -> None:
        """Insert every block of a smaller table into this one."""
        mask = i64(len(self.slots)) - 1
        for position in range(i64(len(slots))):
            slot = slots[position]
            if slot != 0:
                home = (slot >> ID_BITS) >> self.home_shift
                while self.slots[home] != 0:
                    home = (home + 1) & mask
                self.slots[home] = slot

    def move_up(self, first: i64, last: i64, step: i64) -> None:
        """Move blocks `first` to `last` to ids higher by `step`. O(num_blocks)."""
        num_words = (i64(len(self.words)) - 8) // self.num_blocks
        entry = last - 1
        while entry >= first:
            target = entry + step
            for word in range(num_words):
                self.words[self.first_word + target * num_words + word] = self.words[
                    self.first_word + entry * num_words + word
                ]
            self.identity[2 * target] = self.identity[2 * entry]
            self.identity[2 * target + 1] = self.identity[2 * entry + 1]
            self.chain_hash[target] = self.chain_hash[entry]
            self.next_equal[target] = self.next_equal[entry]
            self.prev_equal[target] = self.prev_equal[entry]
            self.identity[2 * entry] = NO_CONTENT
            self.next_equal[entry] = 0
            self.prev_equal[entry] = 0
            entry -= 1
        move_links_up(self.next_equal, first, step)
        move_links_up(self.prev_equal, first, step)
        for position in range(i64(len(self.slots))):
            if self.slots[position] & ID_MASK >= first:
                self.slots[position] += step


def move_links_up(links: vec[i32], first: i64, step: i64) -> None:
    """Add `step` to each link to block `first` or later."""
    for place in range(i64(len(links))):
        if i64(links[place]) >= first:
            links[place] += i32(step)


def bits_for(min_slots: int) -> int:
    """Return the logarithm of the smallest power of two that is at least `min_slots`."""
    return max(1, (min_slots - 1).bit_length())
