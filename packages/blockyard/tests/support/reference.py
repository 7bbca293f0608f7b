"""The manager as lists and dicts: slow, obvious, and written without the core.

It models what the laws in docs/architecture.md promise, down to the order of the free queue. Nothing here imports
Blockyard: a refusal is a `Refused` that carries the *name* of the error the manager must raise.

The index is a tree of contents. A content is "these tokens after that parent content"; its node lists the blocks
that hold it, oldest first, and a node whose list runs empty is cut off with everything below it. Two sequences
reach the same node only by the same tokens from the start under the same extra keys, so a hit is exact by
construction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SCHEDULED = "SCHEDULED"
NO_BLOCKS = "NO_BLOCKS"
WAITS_FOR_PREFIX = "WAITS_FOR_PREFIX"


class Refused(Exception):
    """The manager must raise the error of this name and change nothing."""

    def __init__(self, name: str, why: str = "") -> None:
        super().__init__(f"{name}: {why}")
        self.name = name


@dataclass(eq=False)
class Node:
    """One content: the tokens of a block after the content of its parent."""

    parent: Node | None = None
    tokens: tuple[int, ...] = ()
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    blocks: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Sequence:
    """A running sequence."""

    row: int
    tokens: list[int]
    keys: tuple[Any, ...]
    generation: int
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_published: int = 0
    num_reserved: int = 0
    #: The reservation that ended because another sequence was freed: its step, and its tokens, 0 for none.
    ended: tuple[int, int] = (0, 0)
    #: Where several steps may be in flight: the step and the tokens of each open reservation, and the latest step.
    open: list[tuple[int, int]] = field(default_factory=list)
    last_step: int = 0
    #: Whether the last token waits for a block of the sequence's own to stand in.
    has_unplaced: bool = False
    waits_on: Sequence | None = None
    num_needed: int = 0
    #: Tokens of its prompt, until it computes for the first time.
    num_uncounted: int = 0


@dataclass
class Step:
    """The expected plan of a reservation, sequence by sequence."""

    status: list[str] = field(default_factory=list)
    num_scheduled: list[int] = field(default_factory=list)
    num_computed: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    #: Blocks of the context up to the last scheduled token, and all blocks of the row.
    pages: list[list[int]] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)


class ReferenceManager:
    """The calls of `KVCacheManager`, with rows in place of handles."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        caching: bool = True,
        watermark_blocks: int = 0,
        max_steps: int = 1,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.caching = caching
        self.watermark_blocks = watermark_blocks
        self.max_steps = max_steps
        #: Steps 1 to num_begun were reserved, those after num_ended are in flight.
        self.num_begun = 0
        self.num_ended = 0
        #: Blocks released that wait for a step, in order, and the step that each waits for at last.
        self.waiting: dict[int, list[int]] = {}
        self.until: dict[int, int] = {}
        self.queue = list(range(1, num_blocks))
        self.ref_counts = [0] * num_blocks
        self.free_rows = list(reversed(range(max_num_seqs)))
        self.running: dict[int, Sequence] = {}
        self.roots: dict[tuple[Any, ...], Node] = {}
        self.node_of: dict[int, Node] = {}
        self.owner_of: dict[int, Sequence] = {}
        self.generation = 0
        #: Sequences that the running call to `reserve` has come to.
        self.served: list[Sequence] = []
        self.num_prompt_tokens = 0
        self.num_hit_tokens = 0
        self.num_evicted_blocks = 0
        self.num_copied_blocks = 0
        self.peak_used_blocks = 0

    # ------------------------------------------------------------------ blocks

    def pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def pop_block(self) -> int:
        block = self.queue.pop(0)
        if block in self.node_of:
            self.withdraw(block)
            self.num_evicted_blocks += 1
        self.ref_counts[block] = 1
        self.peak_used_blocks = max(self.peak_used_blocks, self.num_blocks - 1 - len(self.queue))
        return block

    def touch(self, block: int) -> None:
        if self.ref_counts[block] == 0:
            self.queue.remove(block)
        self.ref_counts[block] += 1
        self.peak_used_blocks = max(self.peak_used_blocks, self.num_blocks - 1 - len(self.queue))

    def drop(self, block: int) -> None:
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            if block in self.node_of:
                self.queue.append(block)
            else:
                self.queue.insert(0, block)

    def release_block(self, seq: Sequence, block: int) -> None:
        """`drop`, but not before the last step of the sequence has ended; a block is kept once."""
        step = seq.last_step
        if step <= self.num_ended or block in self.until:
            self.drop(block)
        if step > self.num_ended:
            if block not in self.until:
                self.waiting.setdefault(step, []).append(block)
            self.until[block] = max(step, self.until.get(block, 0))

    def end_step(self, step: int) -> None:
        if not self.num_ended < step <= self.num_begun:
            raise Refused("InvalidArgument", "not in flight")
        if any(opened <= step for seq in self.running.values() for opened, _ in seq.open):
            raise Refused("SequenceNotReady", "a reservation is not committed")
        for number in range(self.num_ended + 1, step + 1):
            for block in self.waiting.pop(number, []):
                if self.until[block] > step:
                    self.waiting.setdefault(self.until[block], []).append(block)
                else:
                    del self.until[block]
                    self.drop(block)
        self.num_ended = step

    # ------------------------------------------------------------------ index

    def look_up(self, tokens: list[int], keys: tuple[Any, ...]) -> list[int]:
        node = self.roots.get(keys)
        hits: list[int] = []
        while node is not None and len(hits) < (len(tokens) - 1) // self.block_size:
            node = node.children.get(self.page(tokens, len(hits)))
            if node is not None:
                hits.append(node.blocks[0])
        return hits

    def joinable(self, hits: list[int]) -> list[int]:
        """The hits that a prompt can take: computed blocks, then pending ones that one owner holds all of.

        A computed block after a pending one is left: whoever had to recompute the pending one alone would write
        into it. And a joiner asks one owner only, so that one must hold every pending block of the joiner.
        """
        first = next((i for i, block in enumerate(hits) if block in self.owner_of), len(hits))
        end = first
        while end < len(hits) and hits[end] in self.owner_of:
            end += 1
        while end > first:
            held = self.owner_of[hits[end - 1]].blocks
            wrong = [i for i in range(first, end) if held[i] != hits[i]]
            if not wrong:
                break
            end = wrong[0]
        return hits[:end]

    def page(self, tokens: list[int], index: int) -> tuple[int, ...]:
        return tuple(tokens[index * self.block_size : (index + 1) * self.block_size])

    def publish(self, seq: Sequence, index: int) -> None:
        if index == 0:
            parent = self.roots.setdefault(seq.keys, Node())
        else:
            parent = self.node_of[seq.blocks[index - 1]]
        tokens = self.page(seq.tokens, index)
        assert len(tokens) == self.block_size
        node = parent.children.setdefault(tokens, Node(parent, tokens))
        node.blocks.append(seq.blocks[index])
        assert seq.blocks[index] not in self.node_of
        self.node_of[seq.blocks[index]] = node

    def withdraw(self, block: int) -> None:
        node = self.node_of.pop(block)
        node.blocks.remove(block)
        if not node.blocks and node.parent is not None and node.parent.children.get(node.tokens) is node:
            del node.parent.children[node.tokens]

    def reset_prefix_cache(self) -> None:
        self.roots.clear()
        self.node_of.clear()
        self.generation += 1

    # ------------------------------------------------------------------ admission

    def num_wanted(self, tokens: list[int], hits: list[int]) -> int:
        """Free blocks that the prompt would take: new ones, and idle hits that leave the queue."""
        idle = sum(self.ref_counts[block] == 0 for block in hits)
        return self.pages(len(tokens)) - len(hits) + idle

    def can_allocate(self, tokens: list[int], keys: tuple[Any, ...] = ()) -> str:
        if len(tokens) > self.max_model_len:
            return "NEVER"
        if self.pages(len(tokens)) > self.num_blocks - 1 - self.watermark_blocks:
            return "NEVER"
        wanted = self.num_wanted(tokens, self.joinable(self.look_up(tokens, keys)))
        if not self.free_rows or wanted > len(self.queue) - self.watermark_blocks:
            return "LATER"
        return "OK"

    def allocate(self, tokens: list[int], keys: tuple[Any, ...] = ()) -> Sequence:
        answer = self.can_allocate(tokens, keys)
        if answer == "NEVER":
            raise Refused("NeverFits")
        if not self.free_rows:
            raise Refused("OutOfRows")
        if answer == "LATER":
            raise Refused("OutOfBlocks")
        hits = self.joinable(self.look_up(tokens, keys))
        seq = Sequence(self.free_rows.pop(), list(tokens), keys, self.generation)
        self.running[seq.row] = seq
        for block in hits:
            self.touch(block)
        seq.blocks = list(hits)
        while len(seq.blocks) < self.pages(len(tokens)):
            seq.blocks.append(self.pop_block())
        if hits and hits[-1] in self.owner_of:
            seq.waits_on = self.owner_of[hits[-1]]
            seq.num_needed = len(hits) * self.block_size
        seq.num_computed = len(hits) * self.block_size
        seq.num_uncounted = len(tokens)
        if self.caching:
            seq.num_published = len(tokens) // self.block_size
            for index in range(len(hits), seq.num_published):
                self.publish(seq, index)
                self.owner_of[seq.blocks[index]] = seq
        return seq

    # ------------------------------------------------------------------ a step

    def start_of(self, seq: Sequence) -> int:
        return seq.num_computed + sum(count for _, count in seq.open)

    def reserve(self, seqs: list[Sequence], num_new_tokens: list[int]) -> Step:
        if self.max_steps > 1 and self.num_begun - self.num_ended == self.max_steps:
            raise Refused("StepsInFlight")
        for seq, num_new in zip(seqs, num_new_tokens, strict=True):
            if num_new < 0 or self.start_of(seq) + num_new > self.max_model_len:
                raise Refused("InvalidArgument", "past max_model_len")
        step = Step()
        self.num_begun += self.max_steps > 1
        self.served = []
        for seq, num_new in zip(seqs, num_new_tokens, strict=True):
            start = self.start_of(seq)
            status = self.reserve_one(seq, start, num_new, step)
            self.served.append(seq)
            given = num_new if status == SCHEDULED else 0
            step.status.append(status)
            step.num_scheduled.append(given)
            step.num_computed.append(start)
            for position in range(start, start + given):
                block = seq.blocks[position // self.block_size]
                step.slots.append(block * self.block_size + position % self.block_size)
        for seq, start, given in zip(seqs, step.num_computed, step.num_scheduled, strict=True):
            step.pages.append(seq.blocks[: self.pages(start + given)])
            step.tables.append(list(seq.blocks))
        return step

    def reserve_one(self, seq: Sequence, start: int, num_new: int, step: Step) -> str:
        if self.max_steps == 1:
            seq.num_reserved = 0
            seq.ended = (0, 0)
        if num_new == 0:
            return SCHEDULED
        if not self.prefix_is_coming(seq):
            return WAITS_FOR_PREFIX
        first = start // self.block_size
        rewrites = seq.num_published <= first < len(seq.blocks)
        copies = rewrites and self.ref_counts[seq.blocks[first]] > 1
        num_missing = max(0, self.pages(start + num_new) - len(seq.blocks))
        if num_missing + copies > len(self.queue):
            return NO_BLOCKS
        if copies:
            self.copy_on_write(seq, start, step)
        elif rewrites and seq.blocks[first] in self.node_of:
            self.withdraw(seq.blocks[first])
        for _ in range(num_missing):
            seq.blocks.append(self.pop_block())
        if len(seq.tokens) <= len(seq.blocks) * self.block_size:
            seq.has_unplaced = False
        if self.max_steps > 1:
            seq.last_step = self.num_begun
            seq.open.append((self.num_begun, num_new))
        seq.num_reserved = seq.open[0][1] if seq.open else num_new
        return SCHEDULED

    def prefix_is_coming(self, seq: Sequence) -> bool:
        """Whether what it joined is computed, or has its slots in this very call."""
        owner = seq.waits_on
        if owner is None:
            return True
        coming = owner.num_reserved if owner in self.served else 0
        if self.max_steps > 1 and (not owner.open or owner.open[0][0] != self.num_begun):
            coming = 0
        return owner.num_computed + coming >= seq.num_needed

    def copy_on_write(self, seq: Sequence, start: int, step: Step) -> None:
        index = start // self.block_size
        old, new = seq.blocks[index], self.pop_block()
        seq.blocks[index] = new
        self.release_block(seq, old)
        if start % self.block_size:
            step.copies.append((old, new))
            self.num_copied_blocks += 1

    def commit(
        self,
        seqs: list[Sequence],
        num_computed: list[int],
        next_tokens: list[list[int]] | None = None,
        step: int | None = None,
    ) -> list[Sequence]:
        appended = next_tokens or [[] for _ in seqs]
        left_out = [seq for seq, num in zip(seqs, num_computed, strict=True) if self.has_ended(seq, num, step)]
        num_computed = [0 if seq in left_out else num for seq, num in zip(seqs, num_computed, strict=True)]
        appended = [[] if seq in left_out else new for seq, new in zip(seqs, appended, strict=True)]
        if self.max_steps > 1:
            self.require_step(seqs, num_computed, appended, step)
        self.require_committable(seqs, num_computed, appended)
        for seq, num, new in zip(seqs, num_computed, appended, strict=True):
            if num:
                self.count_prompt(seq)
            seq.num_computed += num
            self.end_reservation(seq, num, step)
            seq.has_unplaced |= len(new) > self.room(seq)
            seq.tokens += new
        for seq in self.running.values():
            self.settle(seq)
        for seq in seqs:
            self.publish_computed(seq)
        for seq in left_out:
            seq.ended = (0, 0)
        return left_out

    def has_ended(self, seq: Sequence, num: int, step: int | None) -> bool:
        """Whether what is committed of it was reserved, and ended when the owner of its prefix was freed."""
        ended_in, count = seq.ended
        is_replaced = self.max_steps == 1 and seq.num_reserved > 0
        return 0 < num <= count and ended_in == (step or 0) and not is_replaced

    def count_prompt(self, seq: Sequence) -> None:
        self.num_prompt_tokens += seq.num_uncounted
        self.num_hit_tokens += seq.num_computed if seq.num_uncounted else 0
        seq.num_uncounted = 0

    def require_step(
        self, seqs: list[Sequence], num_computed: list[int], appended: list[list[int]], step: int | None
    ) -> None:
        if step is None or not 1 <= step <= self.num_begun:
            raise Refused("InvalidArgument", "not a step")
        for seq, num, new in zip(seqs, num_computed, appended, strict=True):
            steps = [opened for opened, _ in seq.open]
            if step in steps:
                if step != steps[0]:
                    raise Refused("SequenceNotReady", "an earlier step is not committed")
            elif num:
                raise Refused("InvalidArgument", "nothing reserved in the step")
            elif new and steps:
                raise Refused("SequenceNotReady", "appended to while in flight")

    def end_reservation(self, seq: Sequence, num: int, step: int | None) -> None:
        if seq.open and seq.open[0][0] == step:
            seq.open = [] if num < seq.open[0][1] else seq.open[1:]
        seq.num_reserved = seq.open[0][1] if seq.open else 0

    def require_committable(self, seqs: list[Sequence], num_computed: list[int], appended: list[list[int]]) -> None:
        after = {seq: seq.num_computed + num for seq, num in zip(seqs, num_computed, strict=True)}
        for seq, num, new in zip(seqs, num_computed, appended, strict=True):
            num_tokens = len(seq.tokens) + len(new)
            if not 0 <= num <= seq.num_reserved:
                raise Refused("InvalidArgument", "more than reserved")
            if after[seq] > num_tokens:
                raise Refused("InvalidArgument", "computed tokens without an id")
            if num_tokens > self.max_model_len:
                raise Refused("InvalidArgument", "max_model_len")
            owner = seq.waits_on
            if num and owner and after.get(owner, owner.num_computed) < seq.num_needed:
                raise Refused("SequenceNotReady", "its prefix was not computed")
            if new and (seq.has_unplaced or len(new) > self.room(seq) + 1):
                raise Refused("InvalidArgument", "more than one token without a place")

    def room(self, seq: Sequence) -> int:
        """Places for more tokens in blocks that are the sequence's own to write."""
        places = len(seq.blocks) * self.block_size - len(seq.tokens)
        if places <= 0:
            return 0
        block = seq.blocks[len(seq.tokens) // self.block_size]
        return places if self.ref_counts[block] == 1 and block not in self.node_of else 0

    def settle(self, seq: Sequence) -> None:
        """Forget what is no longer pending: blocks that were computed, a prefix that has come."""
        if seq.waits_on is not None and seq.waits_on.num_computed >= seq.num_needed:
            seq.waits_on = None
        for index in range(min(seq.num_computed // self.block_size, len(seq.blocks))):
            if self.owner_of.get(seq.blocks[index]) is seq:
                del self.owner_of[seq.blocks[index]]

    def publish_computed(self, seq: Sequence) -> None:
        if not self.caching or seq.generation != self.generation:
            return
        while seq.num_published < seq.num_computed // self.block_size:
            self.publish(seq, seq.num_published)
            seq.num_published += 1

    # ------------------------------------------------------------------ fork, truncate, free

    def require_settled(self, seq: Sequence) -> None:
        if seq.num_reserved or seq.waits_on or any(owner is seq for owner in self.owner_of.values()):
            raise Refused("SequenceNotReady")

    def fork(self, seq: Sequence, num_children: int) -> list[Sequence]:
        if not 1 <= num_children <= self.max_num_seqs:
            raise Refused("InvalidArgument")
        self.require_settled(seq)
        if seq.num_computed < len(seq.tokens) - 1:
            raise Refused("SequenceNotReady", "tokens to compute")
        if len(self.free_rows) < num_children:
            raise Refused("OutOfRows")
        self.count_prompt(seq)
        return [self.fork_one(seq) for _ in range(num_children)]

    def fork_one(self, seq: Sequence) -> Sequence:
        child = Sequence(self.free_rows.pop(), list(seq.tokens), seq.keys, seq.generation)
        self.running[child.row] = child
        child.blocks = seq.blocks[: self.pages(len(seq.tokens))]
        child.num_computed = seq.num_computed
        child.num_published = seq.num_published
        child.has_unplaced = seq.has_unplaced
        for block in child.blocks:
            self.touch(block)
        return child

    def truncate(self, seq: Sequence, num_tokens: int) -> None:
        if not 1 <= num_tokens <= len(seq.tokens):
            raise Refused("InvalidArgument")
        self.require_settled(seq)
        self.count_prompt(seq)
        seq.has_unplaced &= num_tokens == len(seq.tokens)
        del seq.tokens[num_tokens:]
        seq.num_computed = min(seq.num_computed, num_tokens)
        seq.num_published = min(seq.num_published, num_tokens // self.block_size)
        while len(seq.blocks) > self.pages(num_tokens):
            self.release_block(seq, seq.blocks.pop())

    def free(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self.hand_over(seq)
            del self.running[seq.row]
            for block in reversed(seq.blocks):
                self.release_block(seq, block)
            self.free_rows.append(seq.row)

    def end_with_owner(self, seq: Sequence) -> None:
        """End its reservations, and those of all that wait for it."""
        if seq.num_reserved:
            seq.ended = seq.open[0] if seq.open else (0, seq.num_reserved)
        seq.num_reserved = 0
        seq.open = []
        for other in self.running.values():
            if other.waits_on is seq:
                self.end_with_owner(other)

    def hand_over(self, owner: Sequence) -> None:
        """Pending blocks of a sequence that ends go to the one that joined most of them, or out of the index."""
        waiting = [seq for seq in self.running.values() if seq.waits_on is owner]
        num_full = owner.num_computed // self.block_size
        heir = max(waiting, key=lambda seq: (seq.num_needed, -seq.row), default=None)
        for index in range(num_full, len(owner.blocks)):
            block = owner.blocks[index]
            if self.owner_of.get(block) is not owner:
                continue
            if heir is not None and block in heir.blocks:
                self.owner_of[block] = heir
            else:
                del self.owner_of[block]
                if block in self.node_of:
                    self.withdraw(block)
        for seq in waiting:
            self.end_with_owner(seq)
        for seq in waiting:
            seq.waits_on = heir
        if heir is not None:
            owned = [index for index, block in enumerate(heir.blocks) if self.owner_of.get(block) is heir]
            heir.num_computed = min(heir.num_computed, owned[0] * self.block_size)
            heir.waits_on, heir.num_needed = owner.waits_on, owner.num_needed
