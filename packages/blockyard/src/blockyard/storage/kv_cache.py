"""The keys and values themselves: one tensor of blocks, and the plans carried out on it."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence

import torch

from ..arguments import require_int
from ..config import MAX_BLOCK_SIZE, MAX_BLOCKS
from ..errors import InvalidArgument
from ..sizing import KVCacheSpec, Shard
from ..sizing.shards import require_shard
from .addresses import SlotAddresses, TableAddresses
from .layout import KVLayout, LayerPlaces
from .moves import BlockMoves, MoveList, MoveLists, MoveStream, move_list

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_DIMENSION = 2**20


class KVCache:
    """Keys and values of every layer in blocks of `block_size` tokens: the data plane, which decides nothing.

    It knows slots and block ids, not sequences. All memory is one tensor, so that a block is copied for all
    layers at once; each layer's part has the shape that FlashInfer takes, and the keys and values in it are
    views that FlashAttention takes:

        data              (layers of the largest group, num_blocks, 2, *block_shape)
        combined(layer)   (num_blocks, 2, *block_shape)          FlashInfer's paged_kv_cache
        key_cache(layer)  (num_blocks, *block_shape)             FlashAttention's and vLLM's k_cache
        block_shape       NHD: (block_size, num_kv_heads, head_size);  HND: (num_kv_heads, block_size, head_size)

    Where values are narrower or wider than keys (`value_size`), a block is its keys and then its values, without an
    axis for the two: `data` is (places, num_blocks, elements of a block), and there is no `combined`. So it is with an
    index (`index_size`): the keys by which sparse attention selects tokens lie behind keys and values.

    The paging is PagedAttention's (Kwon et al., SOSP 2023). Memory starts as zeros; the null block, id 0, stays
    so: it is what padded table entries read, and a write to it is refused. On a CPU the system gives memory to a block
    when it is first written.

    Layers of several groups (`LayerGroup`) share the tensor: a block belongs to one group at a time, so that the first
    layers of all groups have the same place in it, and so on. With one group, a layer's place is its number.

    num_blocks: blocks, the null block included. dtype: float32, bfloat16 or float16. device: anything torch
    takes. layout: `KVLayout` or its name. layer_groups: the layers of each group, all of one block size; one group of
    all layers if None. num_cpu_blocks: blocks of the CPU pool, its null block included, as `cpu_data`; 0 for none.
    head_size, value_size: elements of a key and of a value in each head; value_size is head_size if None.
    index_size: elements of a token's index key in each layer, whole on every rank; 0 for none.
    shard: the rank that it belongs to, of those that share num_kv_heads heads (tensor parallel); None for all of them.
        From then on `num_kv_heads` are its own, and `kv_heads` says which: with fewer heads than ranks several keep the
        same one, so that MLA's single latent head is whole on every rank.
    Raises `InvalidArgument` for values outside their limits, and when the device cannot hold the tensor.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        layout: KVLayout | str = KVLayout.NHD,
        layer_groups: Sequence[Sequence[int]] | None = None,
        num_cpu_blocks: int = 0,
        value_size: int | None = None,
        index_size: int = 0,
        shard: Shard | None = None,
    ) -> None:
        self.num_blocks = require_int("num_blocks", num_blocks, 2, MAX_BLOCKS)
        self.block_size = require_int("block_size", block_size, 1, MAX_BLOCK_SIZE)
        self.num_layers = require_int("num_layers", num_layers, 1, _MAX_DIMENSION)
        require_int("num_kv_heads", num_kv_heads, 1, _MAX_DIMENSION)
        self.shard = Shard(0, 1) if shard is None else require_shard(shard)
        #: Which of the model's KV heads are kept here.
        self.kv_heads = self.shard.kv_heads(num_kv_heads)
        self.num_kv_heads = len(self.kv_heads)
        self.head_size = require_int("head_size", head_size, 1, _MAX_DIMENSION)
        self.value_size = head_size if value_size is None else require_int("value_size", value_size, 1, _MAX_DIMENSION)
        self.index_size = require_int("index_size", index_size, 0, _MAX_DIMENSION)
        if dtype not in _DTYPES:
            raise InvalidArgument(f"dtype is {dtype}; it must be float32, bfloat16 or float16")
        self.dtype = dtype
        self.num_cpu_blocks = num_cpu_blocks and require_int("num_cpu_blocks", num_cpu_blocks, 2, MAX_BLOCKS)
        self.layout = KVLayout.parse(layout)
        self.places = LayerPlaces(num_layers, layer_groups)
        sizes = {"value_size": self.value_size, "index_size": index_size}
        self.spec = KVCacheSpec.uniform(
            num_layers, self.num_kv_heads, head_size, block_size=block_size, dtype=dtype, **sizes
        )
        self.data = self._new_data("num_blocks", self.num_blocks, device)
        self.device = self.data.device
        is_cuda = self.device.type == "cuda"
        #: The CPU pool's blocks, the same shape but for their number; None without one. Pinned beside CUDA tensors:
        #: the device writes it when it comes to it, so call torch.cuda.synchronize() before looking from Python.
        self.cpu_data = self._new_data("num_cpu_blocks", num_cpu_blocks, "cpu", is_cuda) if num_cpu_blocks else None
        self._move_stream = MoveStream(self.device, self.places.num_places) if is_cuda else None
        if self._move_stream is not None:
            self._move_stream.hold(self.data)

    @property
    def bytes_per_token(self) -> int:
        """Count the bytes of one token's keys and values over all layers."""
        return self.spec.bytes_per_token

    @property
    def bytes_per_block(self) -> int:
        """Count the bytes of one block over all layers of a group."""
        return self.spec.bytes_per_block // self.num_layers * self.places.num_places

    @property
    def num_bytes(self) -> int:
        """Count the bytes of the whole cache."""
        return self.bytes_per_block * self.num_blocks

    def combined(self, layer: int) -> torch.Tensor:
        """Return keys and values of a layer, (num_blocks, 2, *block_shape), contiguous: FlashInfer's form. No copy.

        Raises `InvalidArgument` if values do not have the size of keys, or index keys lie beside them.
        """
        if not self._is_even:
            raise InvalidArgument(
                f"value_size is {self.value_size}; for one tensor it must be head_size, {self.head_size}, and "
                f"index_size, {self.index_size}, must be 0"
            )
        return self.data[self.places.place(layer)]

    def key_cache(self, layer: int) -> torch.Tensor:
        """Return the keys of a layer, (num_blocks, *block_shape): a view without a copy, each block contiguous."""
        if self._is_even:
            return self.data[self.places.place(layer), :, 0]
        return self._part(layer, slice(None, self._key_elements), self.head_size)

    def value_cache(self, layer: int) -> torch.Tensor:
        """Return the values of a layer, (num_blocks, *block_shape): a view without a copy, each block contiguous."""
        if self._is_even:
            return self.data[self.places.place(layer), :, 1]
        return self._part(layer, slice(self._key_elements, self._key_elements + self._value_elements), self.value_size)

    def index_cache(self, layer: int) -> torch.Tensor:
        """Return the index keys of a layer, (num_blocks, block_size, index_size): a view without a copy."""
        elements = slice(self._key_elements + self._value_elements, None)
        return self.data[self.places.place(layer), :, elements].unflatten(1, (self.block_size, self.index_size))

    @property
    def _is_even(self) -> bool:
        """Return whether values have the size of keys, and nothing lies beside them."""
        return self.value_size == self.head_size and self.index_size == 0

    @property
    def _key_elements(self) -> int:
        """Count the elements of a block's keys in a layer."""
        return self.block_size * self.num_kv_heads * self.head_size

    @property
    def _value_elements(self) -> int:
        """Return the elements of a block's values in a layer."""
        return self.block_size * self.num_kv_heads * self.value_size

    def _part(self, layer: int, elements: slice, size: int) -> torch.Tensor:
        shape = self.layout.block_shape(self.block_size, self.num_kv_heads, size)
        return self.data[self.places.place(layer), :, elements].unflatten(1, shape)

    def slots(self, slot_mapping: object) -> SlotAddresses:
        """Check a plan's slot mapping once, for `write` in every layer of the step. O(tokens)."""
        return SlotAddresses(slot_mapping, self.num_blocks, self.block_size, self.device)

    def tables(self, block_tables: object, seq_lens: object) -> TableAddresses:
        """Check block tables and lengths once, for `gather` in every layer of the step. O(entries)."""
        return TableAddresses(block_tables, seq_lens, self.num_blocks, self.block_size, self.device)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: object) -> None:
        """Write tokens' keys and values, (tokens, num_kv_heads, their size), to their slots. O(tokens).

        slots: a plan's `slot_mapping` (int array, one slot a token), or what `slots()` made of it. If a slot
        occurs twice, either token may win. Raises `InvalidArgument` for a slot outside the blocks, a shape or
        dtype that is not the cache's; nothing is written then.
        """
        where = slots if isinstance(slots, SlotAddresses) else self.slots(slots)
        self._require_own(where)
        self._require_tensor("key", key, (where.num_tokens, self.num_kv_heads, self.head_size))
        self._require_tensor("value", value, (where.num_tokens, self.num_kv_heads, self.value_size))
        if self._move_stream is not None:
            self._move_stream.wait(self.places.place(layer))
        if self.layout is KVLayout.NHD and self._is_even:
            rows = self.combined(layer).view(-1, self.num_kv_heads, self.head_size)
            rows.index_copy_(0, where.key_rows, key)
            rows.index_copy_(0, where.value_rows, value)
        elif self.layout is KVLayout.NHD:
            self.key_cache(layer)[where.block_ids, where.offsets] = key
            self.value_cache(layer)[where.block_ids, where.offsets] = value
        else:
            self.key_cache(layer).transpose(1, 2)[where.block_ids, where.offsets] = key
            self.value_cache(layer).transpose(1, 2)[where.block_ids, where.offsets] = value

    def write_index(self, layer: int, keys: torch.Tensor, slots: SlotAddresses) -> None:
        """Write tokens' index keys, (tokens, index_size), to their slots. O(tokens). Raises as `write`."""
        self._require_own(slots)
        self._require_tensor("index key", keys, (slots.num_tokens, self.index_size))
        if self._move_stream is not None:
            self._move_stream.wait(self.places.place(layer))
        self.index_cache(layer)[slots.block_ids, slots.offsets] = keys

    def gather_index(self, layer: int, tables: TableAddresses) -> torch.Tensor:
        """Read sequences' index keys, (seqs, width, index_size); what is behind a sequence's length says nothing."""
        self._require_own(tables)
        ids = tables.halves[: tables.num_seqs * tables.width_blocks] // 2
        return self.index_cache(layer)[ids].view(tables.num_seqs, -1, self.index_size)

    def gather(
        self, layer: int, tables: TableAddresses, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read sequences through their block tables: (seqs, width, num_kv_heads, their size) of keys and of values.

        width is `tables.width_tokens`; behind a sequence's length there are zeros. out: a buffer from
        `new_buffer` that holds at least seqs * width tokens; the result then lies in it (for NHD without a
        further copy), and a large buffer used again is up to four times faster than a fresh one. O(tokens).
        """
        self._require_own(tables)
        if not self._is_even:
            return self._gather_uneven(layer, tables, out)
        num_halves = len(tables.halves)
        buffer = self._gather_buffer(num_halves, out)
        halves = self.combined(layer).view(2 * self.num_blocks, -1)
        torch.index_select(halves, 0, tables.halves, out=buffer)
        blocks = buffer.view(2 * tables.num_seqs, tables.width_blocks, -1)
        tokens = self._tokens(blocks, self.head_size)
        tokens.flatten(0, 1).index_fill_(0, tables.stale_rows, 0)
        return tokens[: tables.num_seqs], tokens[tables.num_seqs :]

    def _gather_uneven(
        self, layer: int, tables: TableAddresses, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `gather`, where keys and values differ in size: first all keys in the buffer, then all values."""
        num_blocks = tables.num_seqs * tables.width_blocks
        buffer = self._gather_buffer(2 * num_blocks, out).flatten()
        ids, stale = tables.halves[:num_blocks] // 2, tables.stale_rows[: len(tables.stale_rows) // 2]
        found, start = [], 0
        for part, size in ((self.key_cache(layer), self.head_size), (self.value_cache(layer), self.value_size)):
            end = start + num_blocks * part[0].numel()
            blocks = buffer[start:end].view(num_blocks, *part.shape[1:])
            torch.index_select(part, 0, ids, out=blocks)
            tokens = self._tokens(blocks.view(tables.num_seqs, tables.width_blocks, -1), size)
            tokens.flatten(0, 1).index_fill_(0, stale, 0)
            found.append(tokens)
            start = end
        return found[0], found[1]

    def _tokens(self, blocks: torch.Tensor, size: int) -> torch.Tensor:
        """Return gathered blocks of rows, (rows, blocks, elements), as (rows, tokens, num_kv_heads, size)."""
        blocks = blocks.unflatten(2, self.layout.block_shape(self.block_size, self.num_kv_heads, size))
        if self.layout is KVLayout.HND:
            blocks = blocks.transpose(2, 3).contiguous()
        return blocks.flatten(1, 2)

    def new_buffer(self, num_tokens: int) -> torch.Tensor:
        """Return a buffer into which `gather` can read up to `num_tokens` tokens, padding included."""
        num_blocks = -(-require_int("num_tokens", num_tokens, 1, 2**40) // self.block_size)
        return torch.empty((2 * num_blocks, self._half_elements), dtype=self.dtype, device=self.device)

    @property
    def _half_elements(self) -> int:
        """Elements of a row of a buffer, two of which hold a block: of keys or values, or of half of both."""
        both = self.block_size * self.num_kv_heads * (self.head_size + self.value_size)
        return -(-both // 2)

    def move_blocks(self, plan: BlockMoves) -> None:
        """Carry out what a plan moves, in its order: swap_outs, swap_ins, copies. O(blocks).

        Each is (n, 2), rows (from, to), over all layers; what a list reads is read before any of it is written. Raises
        `InvalidArgument` for an id outside its pool, the null block, or a block that is written twice; nothing is
        moved then.
        """
        lists = self._checked_lists(plan)
        self.finish_moves()
        self._carry_out(lists, slice(None))

    def start_moves(self, plan: BlockMoves) -> None:
        """Like `move_blocks`, and returns at once on CUDA: blocks move layer by layer on a stream of their own.

        They move when everything asked of the device before is done, and `write` to a layer waits (on the device) for
        that layer's blocks, so the first layers compute while the last ones' blocks still move. Call `finish_moves`
        before reading what is not written by a step. On other devices the same as `move_blocks`.
        """
        lists = self._checked_lists(plan)
        if self._move_stream is None:
            self._carry_out(lists, slice(None))
        else:
            self._move_stream.start(lambda place: self._carry_out(lists, slice(place, place + 1)))

    def finish_moves(self) -> None:
        """Have the device do nothing more before the moves that were started are done. No-op where none are."""
        if self._move_stream is not None:
            for place in range(self.places.num_places):
                self._move_stream.wait(place)

    def copy_blocks(self, copies: object) -> None:
        """Copy blocks within the pool: (n, 2), rows (old, new), as `plan.copies`. O(n). Raises as `move_blocks`."""
        self.move_blocks(MoveLists(copies=copies))

    def swap_out(self, swap_outs: object) -> None:
        """Copy blocks to the CPU pool: (n, 2), rows (block, CPU block). O(n). Raises as `move_blocks`."""
        self.move_blocks(MoveLists(swap_outs=swap_outs))

    def swap_in(self, swap_ins: object) -> None:
        """Copy blocks from the CPU pool: (n, 2), rows (CPU block, block). O(n). Raises as `move_blocks`."""
        self.move_blocks(MoveLists(swap_ins=swap_ins))

    def _checked_lists(self, plan: BlockMoves) -> list[MoveList]:
        pool, cpu = (self.data, self.num_blocks), (self.cpu_data, self.num_cpu_blocks)
        return [
            move_list("swap_outs", plan.swap_outs, *pool, *cpu),
            move_list("swap_ins", plan.swap_ins, *cpu, *pool),
            move_list("copies", getattr(plan, "copies", ()), *pool, *pool),
        ]

    def _carry_out(self, lists: list[MoveList], places: slice) -> None:
        for moves in lists:
            moves.carry_out(places)

    def _new_data(
        self, name: str, num_blocks: int, device: torch.device | str, pin_memory: bool = False
    ) -> torch.Tensor:
        block_shape = self.layout.block_shape(self.block_size, self.num_kv_heads, self.head_size)
        elements = self._key_elements + self._value_elements + self.block_size * self.index_size
        block = (2, *block_shape) if self._is_even else (elements,)
        shape = (self.places.num_places, num_blocks, *block)
        try:
            return _zeros(shape, self.dtype, torch.device(device), pin_memory)
        except (
            RuntimeError,
            AssertionError,
            ValueError,
            OSError,
            OverflowError,
        ) as error:  # torch has no narrower type
            reason = str(error).strip().splitlines()[0]
            raise InvalidArgument(
                f"{name} is {num_blocks}, device is {device}: {self.bytes_per_block * num_blocks / 2**20:.0f} MiB of "
                f"keys and values could not be allocated there ({reason})"
            ) from error

    def _gather_buffer(self, num_halves: int, out: torch.Tensor | None) -> torch.Tensor:
        size = self._half_elements
        if out is None:
            return torch.empty((num_halves, size), dtype=self.dtype, device=self.device)
        if out.dtype != self.dtype or out.ndim != 2 or out.shape[0] < num_halves or out.shape[1] != size:
            raise InvalidArgument(
                f"out has shape {tuple(out.shape)} and dtype {out.dtype}; it must be at least ({num_halves}, {size}) "
                f"of {self.dtype}, as new_buffer makes it"
            )
        return out[:num_halves]

    def _require_own(self, addresses: object) -> None:
        if not isinstance(addresses, (SlotAddresses, TableAddresses)):
            raise InvalidArgument(
                f"tables is a {type(addresses).__name__}; it must be what tables() makes of block tables and lengths"
            )
        if (addresses.num_blocks, addresses.block_size) != (self.num_blocks, self.block_size):
            raise InvalidArgument(
                f"addresses were made for {addresses.num_blocks} blocks of {addresses.block_size} tokens; this cache "
                f"has {self.num_blocks} of {self.block_size}"
            )

    def _require_tensor(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            raise InvalidArgument(
                f"{name} has shape {tuple(tensor.shape)}; it must be (tokens, num_kv_heads, its size) = {shape}"
            )
        if tensor.dtype != self.dtype:
            raise InvalidArgument(f"{name} has dtype {tensor.dtype}; the cache has {self.dtype}")


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin_memory: bool) -> torch.Tensor:
    """Return a tensor of zeros; in a CPU's own memory the system gives each page when something is first written there.

    torch.zeros writes all of it.
    """
    if device.type != "cpu" or pin_memory:
        return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pin_memory)
    return torch.frombuffer(_untouched(math.prod(shape) * dtype.itemsize), dtype=dtype).view(*shape)


def _untouched(num_bytes: int) -> mmap.mmap:
    """Return memory that no process shares, from the beginning of a page."""
    if sys.platform == "win32":
        return mmap.mmap(-1, num_bytes)
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
