"""The prefix caches of many engines, rebuilt exactly from their KV events."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ...arguments import require_int, require_str
from ...core.tokens import integer_array, pack_tokens
from ...errors import InvalidArgument
from ...hash_seeds import hash_seed_or_drawn
from ...keys import canonical_keys, plain_keys, require_spans_within, spans_by_block, spans_of
from ..tables.block_trie import BlockTrie, Path
from ..tables.matching import HolderRows, Lengths
from ..tables.packed_numbers import num_items
from ..tables.window_groups import STATE_WINDOW, WindowGroup, longest_fit
from ..wire import (
    GPU,
    MAX_SEQUENCE,
    STATE_KIND,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    Payload,
    lora_name,
    read_keys,
    untag_keys,
)
from .matches import Matches
from .stream import Message, MessageOrder, Trust

MAX_BLOCK_SIZE = 4096
MAX_WORKERS = 2**16
#: Limits of a publisher's layer groups and windows.
MAX_GROUPS = 64
MAX_WINDOW = 2**31 - 1


@dataclass(slots=True)
class _Group:
    """A layer group of a worker: a holder in the trie of its block size."""

    block_size: int
    window: int
    holder: int


@dataclass(slots=True)
class _Worker:
    order: MessageOrder = field(default_factory=MessageOrder)
    groups: dict[int, _Group] = field(default_factory=dict)
    num_groups: int = 1
    num_unreadable: int = 0

    #: Its only layer group, if it has one and that has no window.
    plain: _Group | None = None

    def settle(self) -> None:
        """Update `plain` after the groups have changed."""
        only = next(iter(self.groups.values()), None)
        is_plain = only is not None and len(self.groups) == self.num_groups == 1 and not only.window
        self.plain = only if is_plain else None


class _Layout(NamedTuple):
    """The rows of the workers in a match.

    Attributes:
        rows: rows by worker.
        holders: by block size, the row of each holder that is the only layer group of a worker, -1 for others.
        others: rows and workers with several groups, or windows.
    """

    rows: dict[str, int]
    holders: dict[int, HolderRows]
    others: list[tuple[int, _Worker]]


class _Found(NamedTuple):
    """The blocks of one size of a prompt: the path, and the tokens that each holder has."""

    path: Path
    lengths: Lengths


class Mirror:
    """An index of many workers' caches: how many leading tokens of a prompt each one holds.

        mirror = Mirror()
        mirror.receive_live("worker-0", sequence, payload)        each message of its PUB socket
        while (start := mirror.replay_from("worker-0")) is not None:
            mirror.begin_replay("worker-0")
            ...request a replay from `start`, pass each message to mirror.receive_replayed(...), then
            mirror.end_replay("worker-0")
        mirror.match(token_ids)["worker-0"].num_tokens

    It reads the messages of vLLM, SGLang and Blockyard, in maps or arrays, and ignores unknown fields. Blocks are
    compared by tokens and extra keys; hashes are only names, so collisions are harmless. After a gap, a restart or a
    late start a worker is not `Trust.LIVE` until a replay has brought it up to date. `Subscriber` does all this over
    ZeroMQ. Not thread-safe.

    Args:
        hash_seed: seed of the trie's hash function; None for a random one.
    """

    def __init__(self, hash_seed: int | None = None) -> None:
        self._hash_seed = hash_seed_or_drawn(hash_seed)
        self._workers: dict[str, _Worker] = {}
        self._tries: dict[int, BlockTrie] = {}
        #: Unused holder numbers by block size.
        self._spare_holders: dict[int, list[int]] = {}
        #: Rows of a match; None if workers or their groups have changed.
        self._layout: _Layout | None = None
        #: Trust by row; None if one has changed.
        self._trusts: tuple[Trust, ...] | None = None

    # Messages.

    def receive_live(self, worker: str, sequence: int, payload: Payload) -> None:
        """Process a message of a worker's PUB socket. O(blocks). An unreadable message makes the worker untrusted."""
        message = self._read(worker, sequence, payload, is_live=True)
        if message is not None:
            with self._noticed(worker):
                following = self._worker(worker).order.receive_live(message)
                if following is not None:
                    self._apply(worker, following)

    def receive_replayed(self, worker: str, sequence: int, payload: Payload) -> None:
        """Process a message of a worker's replay socket. O(blocks)."""
        message = self._read(worker, sequence, payload, is_live=False)
        if message is not None:
            with self._noticed(worker):
                following = self._worker(worker).order.receive_replayed(message)
                if following is not None:
                    self._apply(worker, following)

    def begin_replay(self, worker: str) -> None:
        """Record that a replay is requested. The rest of an earlier replay is ignored from now on.

        Call it before each request. Without it, a late answer to an earlier request could be taken for the answer to
        this one, although the worker has restarted or a live message was unreadable in between.
        """
        self._worker(worker).order.begin_replay()

    def is_replay_void(self, worker: str) -> bool:
        """Return whether the current replay is invalid, so that it must be discarded and requested again. O(1)."""
        state = self._known(worker)
        return state is not None and state.order.is_void

    def end_replay(self, worker: str) -> None:
        """Process the end of a replay, and apply the live messages that were received meanwhile."""
        state = self._known(worker)
        if state is not None:
            with self._noticed(worker):
                for message in state.order.end_replay():
                    self._apply(worker, message)

    def replay_from(self, worker: str) -> int | None:
        """Return the sequence number to request a replay from; None while no message is missing."""
        state = self._known(worker)
        return 0 if state is None else state.order.replay_from

    def trust(self, worker: str) -> Trust:
        """Return the reliability of a worker's known contents."""
        state = self._known(worker)
        return Trust.UNTRUSTED if state is None else state.order.trust

    def forget(self, worker: str) -> None:
        """Remove a worker and its contents. O(slots of the tables)."""
        self._forget_layout()
        state = self._workers.pop(require_str("worker", worker), None)
        if state is not None:
            self._drop_groups(state)

    def _read(self, worker: str, sequence: int, payload: Payload, is_live: bool) -> Message | None:
        state = self._worker(worker)
        number = -1
        try:
            number = require_int("sequence", sequence, 0, MAX_SEQUENCE)
            return Message.of(number, payload)
        except InvalidArgument:
            state.num_unreadable += 1
            if is_live:
                state.order.note_unreadable_live(number)
            else:
                state.order.note_unreadable_replayed(number)
            self._trusts = None
            return None

    @contextlib.contextmanager
    def _noticed(self, worker: str) -> Iterator[None]:
        """Distrust the worker if an interrupt or lack of memory stops the processing of a message."""
        order = self._workers[worker].order
        before = order.trust
        try:
            yield
        except BaseException:
            order.distrust()
            raise
        finally:
            if order.trust is not before:
                self._trusts = None

    def _known(self, name: str) -> _Worker | None:
        return self._workers.get(require_str("worker", name))

    def _worker(self, name: str) -> _Worker:
        found = self._known(name)
        if found is None:
            if len(self._workers) >= MAX_WORKERS:
                raise InvalidArgument(
                    f"worker is {name!r}; {MAX_WORKERS} workers are followed already, which is the limit"
                )
            self._forget_layout()
            found = self._workers[name] = _Worker()
        return found

    def _forget_layout(self) -> None:
        self._layout = self._trusts = None

    # Events.

    def _apply(self, worker: str, message: Message) -> None:
        state = self._workers[worker]
        try:
            for event in message.batch.events:
                self._apply_one(state, event)
        except (InvalidArgument, RecursionError):  # the latter for deeply nested keys
            state.num_unreadable += 1
            state.order.note_unreadable_replayed(message.number)

    def _apply_one(self, state: _Worker, event: Event) -> None:
        if isinstance(event, BlockStored):
            self._store(state, event)
        elif isinstance(event, BlockRemoved):
            self._remove(state, event)
        elif isinstance(event, AllBlocksCleared):
            self._drop_groups(state)

    def _store(self, state: _Worker, event: BlockStored) -> None:
        names, token_ids = bytes(event.block_hashes), bytes(event.token_ids)
        if num_items(token_ids) == 0:  # on other media vLLM sends only names of blocks
            return
        num_groups = state.num_groups
        if event.num_groups is not None:
            num_groups = require_int("num_groups", event.num_groups, 1, MAX_GROUPS)
        group = self._group(state, event)
        if num_groups != state.num_groups:
            self._forget_layout()
            state.num_groups = num_groups
            state.settle()
        parent = None if event.parent_block_hash is None else _name(event.parent_block_hash)
        request, keys = _keys_of(event, num_items(names))
        trie = self._tries[group.block_size]
        trie.store(
            group.holder, _medium(event.medium), names, parent, token_ids, request, keys, _beside(state, event, group)
        )

    def _remove(self, state: _Worker, event: BlockRemoved) -> None:
        names = bytes(event.block_hashes)
        numbers = list(state.groups) if event.group_idx is None else [event.group_idx]
        for number in numbers:
            group = state.groups.get(number)
            if group is not None:
                self._tries[group.block_size].remove(group.holder, _medium(event.medium), names)

    def _group(self, state: _Worker, event: BlockStored) -> _Group:
        number, window = event.group_idx or 0, event.kv_cache_spec_sliding_window or 0
        if event.kv_cache_spec_kind == STATE_KIND:
            window = STATE_WINDOW
        group = state.groups.get(number)
        if group is not None and group.block_size == event.block_size and group.window == window:
            return group
        require_int("group_idx", number, 0, MAX_GROUPS - 1)
        require_int("block_size", event.block_size, 1, MAX_BLOCK_SIZE)
        require_int("kv_cache_spec_sliding_window", window, 0, MAX_WINDOW)
        self._forget_layout()
        if group is not None:
            state.plain = None
            self._drop_group(state.groups.pop(number))
        group = _Group(event.block_size, window, self._holder(event.block_size))
        state.groups[number] = group
        state.settle()
        return group

    def _holder(self, block_size: int) -> int:
        if block_size not in self._tries:
            self._tries[block_size] = BlockTrie(block_size, self._hash_seed)
            self._spare_holders[block_size] = []
        spare = self._spare_holders[block_size]
        return spare.pop() if spare else self._tries[block_size].add_holder()

    def _drop_groups(self, state: _Worker) -> None:
        """Remove all contents of a worker. It may have other groups from now on."""
        self._forget_layout()
        state.plain = None
        while state.groups:
            # Remove it first: an interrupt then loses a holder's number, but never assigns it twice.
            self._drop_group(state.groups.popitem()[1])
        state.num_groups = 1
        state.settle()

    def _drop_group(self, group: _Group) -> None:
        trie, spare = self._tries[group.block_size], self._spare_holders[group.block_size]
        trie.clear(group.holder)
        spare.append(group.holder)
        if len(spare) == trie.num_holders:  # no holder has blocks of this size
            del self._tries[group.block_size], self._spare_holders[group.block_size]

    # Queries.

    def match(self, token_ids: Any, extra_keys: Any = (), *, num_tokens: int | None = None) -> Matches:
        """Return the leading tokens of a prompt that each worker holds. O(blocks found + workers).

        With layer groups, these are the tokens that all groups hold, and of sliding windows only the last ones. A
        worker with a window takes O(blocks of the window), at most O(blocks found) per group.

        Args:
            token_ids: tokens of the prompt.
            extra_keys: its extra keys.
            num_tokens: how many of its tokens may match; None for all. A cache always computes the last token of a
                prompt, so pass `len(token_ids) - 1` for the tokens it can reuse. Truncating the result instead may give
                a length at which a sliding window or a state cannot be resumed.

        Raises:
            InvalidArgument: bad tokens or keys.
        """
        keys = canonical_keys(extra_keys)
        if not isinstance(token_ids, (list, tuple)):
            token_ids = integer_array("token_ids", token_ids)
        require_spans_within(spans_of(keys), len(token_ids))
        asked = token_ids
        if num_tokens is not None:
            asked = token_ids[: require_int("num_tokens", num_tokens, 0, len(token_ids))]
        tries = self._tries if len(asked) else {}
        if not tries:
            pack_tokens(token_ids, 1)  # so that bad tokens are rejected even if the mirror is empty
        layout = self._layout = self._layout or self._laid_out()
        if self._trusts is None:
            self._trusts = tuple([state.order.trust for state in self._workers.values()])
        best = Lengths(len(layout.rows))
        found = {}
        for size, trie in tries.items():
            paths = self._paths(size, trie, asked, keys)
            found[size] = [_Found(path, trie.match(path, layout.holders[size], best)) for path in paths]
        for row, state in layout.others if tries else ():
            best.raise_to(row, *self._match_groups(state, found))
        return Matches(layout.rows, best, self._trusts)

    def _laid_out(self) -> _Layout:
        """Return the rows of workers and holders. O(workers + holders)."""
        rows, others = {}, []
        holders = {size: np.full(int(trie.num_holders), -1) for size, trie in self._tries.items()}
        for row, (name, state) in enumerate(self._workers.items()):
            rows[name] = row
            if state.plain is None:
                others.append((row, state))
            else:
                holders[state.plain.block_size][state.plain.holder] = row
        return _Layout(rows, {size: HolderRows(each) for size, each in holders.items()}, others)

    def _paths(self, size: int, trie: BlockTrie, token_ids: Any, keys: Any) -> list[Path]:
        """Return the path of a prompt as far as any worker holds it, for each form of its keys."""
        if not keys:
            return [trie.find_path(token_ids, (), {})]
        num_blocks = len(token_ids) // size
        spans = spans_by_block(spans_of(keys), size, num_blocks)
        forms = [(plain_keys(keys), spans), _untagged_form(plain_keys(keys), spans, num_blocks)]
        return [trie.find_path(token_ids, request, by_block) for request, by_block in forms]

    def _match_groups(self, state: _Worker, found: dict[int, list[_Found]]) -> tuple[int, int]:
        """Return how many leading tokens all layer groups of a worker hold, on any medium and on the GPU."""
        best = (0, 0)
        if not state.groups or len(state.groups) < state.num_groups:
            return best  # a layer group holds nothing
        for form in range(max(len(forms) for forms in found.values())):
            lengths = [
                found[group.block_size][form].lengths.of(group.holder)
                for group in state.groups.values()
                if not group.window
            ]
            everywhere, on_gpu = map(min, zip(*lengths, strict=True)) if lengths else (-1, -1)
            everywhere = self._within_windows(state, found, form, everywhere)
            best = max(best, (everywhere, max(min(on_gpu, everywhere), 0)))
        return best

    def _within_windows(self, state: _Worker, found: dict[int, list[_Found]], form: int, length: int) -> int:
        """Return the longest hit of at most `length` tokens (-1: any) whose last tokens are in all windows."""
        step = math.lcm(*(group.block_size for group in state.groups.values()))
        windows = [
            WindowGroup(self._tries[group.block_size], found[group.block_size][form].path, group.holder, group.window)
            for group in state.groups.values()
            if group.window
        ]
        return longest_fit(windows, length if length >= 0 else max(group.num_tokens for group in windows), step)

    def num_holdings(self) -> int:
        """Return the blocks that workers hold, counted once per worker. O(block sizes)."""
        return sum(int(trie.holdings.num_holdings) for trie in self._tries.values())

    def num_bytes(self) -> int:
        """Return the bytes of the tries' arrays. O(block sizes)."""
        return sum(trie.num_bytes() for trie in self._tries.values())


def _name(given: int | bytes) -> int:
    """Return 64 bits of a block's name; for bytes the last eight, as in vLLM."""
    number = int.from_bytes(given[-8:], "big") if isinstance(given, bytes) else given
    return (number + 2**63) % 2**64 - 2**63


def _beside(state: _Worker, event: BlockStored, group: _Group) -> list[int]:
    """Return the holders of a worker's other groups that may hold the block before a state."""
    if event.kv_cache_spec_kind != STATE_KIND:
        return []
    return [other.holder for other in state.groups.values() if other.block_size == group.block_size]


def _medium(name: str | None) -> int:
    """Return 0 for the GPU, also if the sender names no medium, and 1 for slower media."""
    return 0 if name is None or name == GPU else 1


def _keys_of(event: BlockStored, num_blocks: int) -> tuple[tuple[Any, ...], list[tuple[Any, ...]]]:
    """Return the keys of a request and of each block, as the trie compares them."""
    request: tuple[Any, ...]
    given, plain = read_keys("keys", event.keys), read_keys("extra_keys", event.extra_keys)
    if given is not None:
        rows = [_frozen(row) for row in given]
        if any(type(key) is not tuple for row in rows for key in row):
            raise InvalidArgument("keys holds an item that is not a list")
        request = tuple(key for key in (rows[0] if rows else ()) if key and key[0] != "span")
        blocks = [tuple(key[1:] for key in row if key and key[0] == "span") for row in rows]
    elif plain is not None or _adapter_of(event) is not None or event.cache_salt is not None:
        adapter = _adapter_of(event)
        request = _untagged_request(adapter)
        # Older senders and SGLang only send the adapter's name; newer ones also in each block's keys.
        blocks = [_frozen(row) for row in plain or [None if adapter is None else [adapter]] * num_blocks]
        if plain is None and event.cache_salt is not None and event.parent_block_hash is None and blocks:
            blocks[0] += (event.cache_salt,)
    else:
        return (), []
    if len(blocks) != num_blocks:
        raise InvalidArgument(
            f"extra_keys has {len(blocks)} items; it must have one for each of the {num_blocks} blocks"
        )
    _require_plain((request, blocks))
    return request, blocks if any(blocks) else []


def _adapter_of(event: BlockStored) -> str | None:
    """Return the name of a LoRA adapter, or its number from a sender without names."""
    if event.lora_name is None and event.lora_id is not None:
        return str(event.lora_id)
    return event.lora_name


def _untagged_form(
    request: tuple[Any, ...], spans: dict[int, tuple[Any, ...]], num_blocks: int
) -> tuple[tuple[Any, ...], dict[int, tuple[Any, ...]]]:
    """Return the same keys in the form of a sender that does not tag them."""
    rows = {block: _frozen(untag_keys(request, spans.get(block, ()), block == 0)) for block in range(num_blocks)}
    return _untagged_request(lora_name(request)), {block: row for block, row in rows.items() if row}


def _untagged_request(adapter: str | None) -> tuple[Any, ...]:
    """Return the keys of a request with only an adapter; salt and images are in the blocks' keys."""
    return () if adapter is None else (("untagged", adapter),)


def _frozen(row: Any) -> tuple[Any, ...]:
    if row is None:
        return ()
    if not isinstance(row, (list, tuple)):
        raise InvalidArgument(f"extra_keys holds {type(row).__name__}; it must have a list for each block")
    return tuple(_frozen(item) if isinstance(item, (list, tuple)) else item for item in row)


def _require_plain(keys: Any) -> None:
    """Reject keys other than text, numbers and tuples of them: comparing others could run foreign code."""
    if isinstance(keys, (list, tuple)):
        for key in keys:
            _require_plain(key)
    elif not isinstance(keys, (str, int, float, bytes, bool, type(None))):
        raise InvalidArgument(f"extra_keys holds {type(keys).__name__}; it must hold text and numbers")
