"""What consumers hold: the prefix caches of many engines, rebuilt from their KV events, exact."""

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
    keys_in,
    lora_name,
    untagged,
)
from .matches import Matches
from .stream import Message, MessageOrder, Trust

MAX_BLOCK_SIZE = 4096
MAX_WORKERS = 2**16
#: Layer groups of one worker, and window lengths, as a publisher may name them.
MAX_GROUPS = 64
MAX_WINDOW = 2**31 - 1


@dataclass(slots=True)
class _Group:
    """One layer group of a worker: a holder in the trie of its block size."""

    block_size: int
    window: int
    holder: int


@dataclass(slots=True)
class _Worker:
    order: MessageOrder = field(default_factory=MessageOrder)
    groups: dict[int, _Group] = field(default_factory=dict)
    num_groups: int = 1
    num_unreadable: int = 0

    #: Its one layer group, if that is all and it has no window.
    plain: _Group | None = None

    def settle(self) -> None:
        """Its groups have changed."""
        only = next(iter(self.groups.values()), None)
        is_plain = only is not None and len(self.groups) == self.num_groups == 1 and not only.window
        self.plain = only if is_plain else None


class _Layout(NamedTuple):
    """Who is which row of an answer. rows: by worker. holders: by block size, the row of each holder that is the one
    layer group of a worker, -1 for others. others: rows and workers with several groups, or windows."""

    rows: dict[str, int]
    holders: dict[int, HolderRows]
    others: list[tuple[int, _Worker]]


class _Found(NamedTuple):
    """A prompt's blocks of one size: the path, and the tokens of it that each holder has."""

    path: Path
    lengths: Lengths


class Mirror:
    """An index over the caches of many workers: which leading tokens of a prompt each one has.

        mirror = Mirror()
        mirror.live("worker-0", sequence, payload)        each message of its PUB socket
        while (start := mirror.replay_from("worker-0")) is not None:
            mirror.begin_replay("worker-0")
            ...ask its replay socket from `start`, give each answer to mirror.replayed(...), then
            mirror.end_of_replay("worker-0")
        mirror.match(token_ids)["worker-0"].num_tokens

    It reads the messages of vLLM, SGLang and Blockyard, in maps or arrays, and passes over what it does not know.
    Blocks are compared by their tokens and extra keys: a hash is a name, and a collision of two is harmless.
    After a gap, a restart or a late start a worker is not `Trust.LIVE` until a replay has brought it up to date.
    `Subscriber` does the reading and asking. It is not thread-safe.

    hash_seed: of the trie's hash function; None draws a secret one.
    """

    def __init__(self, hash_seed: int | None = None) -> None:
        self._hash_seed = hash_seed_or_drawn(hash_seed)
        self._workers: dict[str, _Worker] = {}
        self._tries: dict[int, BlockTrie] = {}
        #: For each block size, numbers of holders that are not in use.
        self._spare_holders: dict[int, list[int]] = {}
        #: Who is a row of an answer; None when workers or their groups have changed.
        self._layout: _Layout | None = None
        #: By row; None when one has changed.
        self._trusts: tuple[Trust, ...] | None = None

    # Messages.

    def live(self, worker: str, sequence: int, payload: Payload) -> None:
        """Read a message of a worker's PUB socket. O(blocks). One that cannot be read makes the worker untrusted."""
        message = self._read(worker, sequence, payload, is_live=True)
        if message is not None:
            with self._noticed(worker):
                following = self._worker(worker).order.live(message)
                if following is not None:
                    self._apply(worker, following)

    def replayed(self, worker: str, sequence: int, payload: Payload) -> None:
        """Read a message of a worker's replay socket."""
        message = self._read(worker, sequence, payload, is_live=False)
        if message is not None:
            with self._noticed(worker):
                following = self._worker(worker).order.replayed(message)
                if following is not None:
                    self._apply(worker, following)

    def begin_replay(self, worker: str) -> None:
        """A replay is asked for, and what is left of the answer to an earlier request is not read.

        Say so where messages are read by hand: an answer that was on its way while the worker began anew, or while a
        live message came that could not be read, is told from the one to the next request by this alone.
        """
        self._worker(worker).order.begin_replay()

    def is_replay_void(self, worker: str) -> bool:
        """Return whether nothing of the answer that is on its way counts any more: drop it, and ask again. O(1)."""
        state = self._known(worker)
        return state is not None and state.order.is_void

    def end_of_replay(self, worker: str) -> None:
        """Take the end mark of a replay: what came live meanwhile counts from now on."""
        state = self._known(worker)
        if state is not None:
            with self._noticed(worker):
                for message in state.order.end_of_replay():
                    self._apply(worker, message)

    def replay_from(self, worker: str) -> int | None:
        """The sequence number to ask the replay socket for; None while nothing is missing."""
        state = self._known(worker)
        return 0 if state is None else state.order.replay_from

    def trust(self, worker: str) -> Trust:
        """Return whether what is known of a worker is all that its messages said."""
        state = self._known(worker)
        return Trust.UNTRUSTED if state is None else state.order.trust

    def forget(self, worker: str) -> None:
        """A worker is gone: nothing of it is known any more. O(slots of the tables)."""
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
                state.order.miss_live(number)
            else:
                state.order.miss_replayed(number)
            self._trusts = None
            return None

    @contextlib.contextmanager
    def _noticed(self, worker: str) -> Iterator[None]:
        """If an interrupt or a lack of memory cuts a message short, the mirror treats it as lost."""
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
        """Return a worker of which something was heard."""
        return self._workers.get(require_str("worker", name))

    def _worker(self, name: str) -> _Worker:
        found = self._known(name)
        if found is None:
            if len(self._workers) >= MAX_WORKERS:
                raise InvalidArgument(f"worker is {name!r}; there are {MAX_WORKERS} already, the limit")
            self._forget_layout()
            found = self._workers[name] = _Worker()
        return found

    def _forget_layout(self) -> None:
        """Forget how workers and their groups lie: they change."""
        self._layout = self._trusts = None

    # Events.

    def _apply(self, worker: str, message: Message) -> None:
        state = self._workers[worker]
        try:
            for event in message.batch.events:
                self._apply_one(state, event)
        except (InvalidArgument, RecursionError):  # the latter for keys that are nested without end
            state.num_unreadable += 1
            state.order.miss_replayed(message.number)

    def _apply_one(self, state: _Worker, event: Event) -> None:
        if isinstance(event, BlockStored):
            self._store(state, event)
        elif isinstance(event, BlockRemoved):
            self._remove(state, event)
        elif isinstance(event, AllBlocksCleared):
            self._drop_groups(state)

    def _store(self, state: _Worker, event: BlockStored) -> None:
        names, token_ids = bytes(event.block_hashes), bytes(event.token_ids)
        if num_items(token_ids) == 0:  # of other media, where vLLM names blocks alone
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
        """The worker has nothing, and perhaps other groups from now on."""
        self._forget_layout()
        state.plain = None
        while state.groups:
            # Out first: where this is cut, the number of a holder is lost, and none is given to two.
            self._drop_group(state.groups.popitem()[1])
        state.num_groups = 1
        state.settle()

    def _drop_group(self, group: _Group) -> None:
        trie, spare = self._tries[group.block_size], self._spare_holders[group.block_size]
        trie.clear(group.holder)
        spare.append(group.holder)
        if len(spare) == trie.num_holders:  # no holder has blocks of this size any more
            del self._tries[group.block_size], self._spare_holders[group.block_size]

    # What is asked.

    def match(self, token_ids: Any, extra_keys: Any = (), *, num_tokens: int | None = None) -> Matches:
        """Return for each worker that has any the leading tokens of a prompt that it has. O(blocks found + workers).

        num_tokens: how many of the prompt's tokens may be matched; None: all. A cache always computes the last token of
        a prompt, so what it can give is matched with `len(token_ids) - 1`. Cutting the answer instead may leave a
        length at which a sliding window or a state cannot be resumed.

        With layer groups: as many tokens as all of them have, and of a sliding window its last tokens, which takes
        O(blocks of the window) for each worker that has one, at most O(blocks found) for each of its groups.
        Raises `InvalidArgument` for bad tokens or keys.
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
            pack_tokens(token_ids, 1)  # to refuse what is refused where something is known
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
        """O(workers + holders)."""
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
        """For each form of the keys, the blocks of a prompt as far as any worker has them."""
        if not keys:
            return [trie.find_path(token_ids, (), {})]
        num_blocks = len(token_ids) // size
        spans = spans_by_block(spans_of(keys), size, num_blocks)
        forms = [(plain_keys(keys), spans), _untagged_form(plain_keys(keys), spans, num_blocks)]
        return [trie.find_path(token_ids, request, by_block) for request, by_block in forms]

    def _match_groups(self, state: _Worker, found: dict[int, list[_Found]]) -> tuple[int, int]:
        """Returns the leading tokens that all of a worker's layer groups have, anywhere and on the GPU."""
        best = (0, 0)
        if not state.groups or len(state.groups) < state.num_groups:
            return best  # a layer group that has nothing
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
        """Returns the longest hit of at most `length` tokens (-1: any) whose last tokens every window has."""
        step = math.lcm(*(group.block_size for group in state.groups.values()))
        windows = [
            WindowGroup(self._tries[group.block_size], found[group.block_size][form].path, group.holder, group.window)
            for group in state.groups.values()
            if group.window
        ]
        return longest_fit(windows, length if length >= 0 else max(group.num_tokens for group in windows), step)

    def num_holdings(self) -> int:
        """Blocks that workers have, each counted for each of them. O(block sizes)."""
        return sum(int(trie.holdings.num_holdings) for trie in self._tries.values())

    def num_bytes(self) -> int:
        """Count the bytes of the tries' arrays. O(block sizes)."""
        return sum(trie.num_bytes() for trie in self._tries.values())


def _name(given: int | bytes) -> int:
    """Return 64 bits of a block's name; of bytes the last eight, as vLLM cuts them."""
    number = int.from_bytes(given[-8:], "big") if isinstance(given, bytes) else given
    return (number + 2**63) % 2**64 - 2**63


def _beside(state: _Worker, event: BlockStored, group: _Group) -> list[int]:
    """Return the holders of a worker's other groups that may have the block before a state."""
    if event.kv_cache_spec_kind != STATE_KIND:
        return []
    return [other.holder for other in state.groups.values() if other.block_size == group.block_size]


def _medium(name: str | None) -> int:
    """0 for the GPU, which is what senders mean who name none; 1 for all that is slower."""
    return 0 if name is None or name == GPU else 1


def _keys_of(event: BlockStored, num_blocks: int) -> tuple[tuple[Any, ...], list[tuple[Any, ...]]]:
    """Return the keys of a request and those of each block, as the trie compares them."""
    request: tuple[Any, ...]
    given, plain = keys_in("keys", event.keys), keys_in("extra_keys", event.extra_keys)
    if given is not None:
        rows = [_frozen(row) for row in given]
        if any(type(key) is not tuple for row in rows for key in row):
            raise InvalidArgument("keys holds what is no list")
        request = tuple(key for key in (rows[0] if rows else ()) if key and key[0] != "span")
        blocks = [tuple(key[1:] for key in row if key and key[0] == "span") for row in rows]
    elif plain is not None or _adapter_of(event) is not None or event.cache_salt is not None:
        adapter = _adapter_of(event)
        request = _untagged_request(adapter)
        # Older senders and SGLang have the adapter's name alone, newer ones have it in each block's keys too.
        blocks = [_frozen(row) for row in plain or [None if adapter is None else [adapter]] * num_blocks]
        if plain is None and event.cache_salt is not None and event.parent_block_hash is None and blocks:
            blocks[0] += (event.cache_salt,)
    else:
        return (), []
    if len(blocks) != num_blocks:
        raise InvalidArgument(f"extra_keys has {len(blocks)} items for {num_blocks} blocks")
    _require_plain((request, blocks))
    return request, blocks if any(blocks) else []


def _adapter_of(event: BlockStored) -> str | None:
    """Return the name of a LoRA adapter, or the number of one from a sender that knows no names."""
    if event.lora_name is None and event.lora_id is not None:
        return str(event.lora_id)
    return event.lora_name


def _untagged_form(
    request: tuple[Any, ...], spans: dict[int, tuple[Any, ...]], num_blocks: int
) -> tuple[tuple[Any, ...], dict[int, tuple[Any, ...]]]:
    """How a sender that does not tag its keys says the same."""
    rows = {block: _frozen(untagged(request, spans.get(block, ()), block == 0)) for block in range(num_blocks)}
    return _untagged_request(lora_name(request)), {block: row for block, row in rows.items() if row}


def _untagged_request(adapter: str | None) -> tuple[Any, ...]:
    """Of an adapter alone: salt and images stand in the blocks' own keys."""
    return () if adapter is None else (("untagged", adapter),)


def _frozen(row: Any) -> tuple[Any, ...]:
    if row is None:
        return ()
    if not isinstance(row, (list, tuple)):
        raise InvalidArgument(f"extra_keys holds {type(row).__name__}; a list for each block is needed")
    return tuple(_frozen(item) if isinstance(item, (list, tuple)) else item for item in row)


def _require_plain(keys: Any) -> None:
    """Text, numbers and tuples of them: hashing and comparing them runs no code of others."""
    if isinstance(keys, (list, tuple)):
        for key in keys:
            _require_plain(key)
    elif not isinstance(keys, (str, int, float, bytes, bool, type(None))):
        raise InvalidArgument(f"extra_keys holds {type(keys).__name__}; text and numbers are needed")
