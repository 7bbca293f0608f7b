"""The tensor of keys and values, and the operations of plans on it."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence

import torch

from ..arguments import require_int
from ..cache_options import MAX_BLOCKS
from ..config import MAX_BLOCK_SIZE
from ..errors import InvalidArgument
from ..sizing import KVCacheSpec, Shard
from ..sizing.shards import require_shard
from .addresses import SlotAddresses, TableAddresses
from .layout import KVLayout, LayerPlaces
from .moves import BlockMoves, MoveList, MoveLists, MoveStream, move_list

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_DIMENSION = 2**20


class KVCache:
    """Keys and values of all layers, in blocks of `block_size` tokens.

    It deals in slots and block ids, not sequences. All memory is one tensor, so that a block is copied for all layers
    at once. Each layer's part has FlashInfer's shape, and its keys and values are views for FlashAttention:

        data              (layers of the largest group, num_blocks, 2, *block_shape)
        combined(layer)   (num_blocks, 2, *block_shape)          FlashInfer's paged_kv_cache
        key_cache(layer)  (num_blocks, *block_shape)             FlashAttention's and vLLM's k_cache
        block_shape       NHD: (block_size, num_kv_heads, head_size);  HND: (num_kv_heads, block_size, head_size)

    If values and keys differ in size (`value_size`), or there are index keys (`index_size`), a block has its keys, then
    its values, then its index keys. Then `data` is (positions, num_blocks, elements of a block), and `combined` raises.

    The paging is PagedAttention's (Kwon et al., SOSP 2023). Memory starts as zeros. The null block, id 0, stays zero,
    because padded table entries read it; writing to it is rejected. On a CPU the system allocates memory for a block
    when it is first written.

    Layers of several groups (`LayerGroup`) share the tensor. A block belongs to one group at a time, so the first
    layers of all groups have the same position in it, and so on. With one group, a layer's position is its number.

    Args:
        num_blocks: blocks, null block included.
        block_size: tokens per block.
        num_layers: layers of the model.
        num_kv_heads: KV heads of the model. The attribute of this name has only those of `shard`, and `kv_heads` lists
            them. With fewer heads than ranks several ranks keep the same one, like MLA's single latent head.
        head_size: elements of a key per head.
        dtype: float32, bfloat16 or float16.
        device: torch's device.
        layout: `KVLayout` or its name.
        layer_groups: layers of each group, all of one block size; None for one group of all layers.
        num_cpu_blocks: blocks of the CPU pool (`cpu_data`), null block included; 0 for none.
        value_size: elements of a value per head; `head_size` if None.
        index_size: elements of a token's index key per layer, whole on every rank; 0 for none.
        shard: rank of this cache among those that share the heads (tensor parallel); None for all heads.

    Raises:
        InvalidArgument: a value is outside its limits, or the device cannot allocate the tensor.
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
        #: The model's KV heads that are kept here.
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
        #: The CPU pool's blocks, in the same shape; None without a CPU pool. Pinned if the cache is on CUDA: the device
        #: writes it asynchronously, so call torch.cuda.synchronize() before reading it in Python.
        self.cpu_data = self._new_data("num_cpu_blocks", num_cpu_blocks, "cpu", is_cuda) if num_cpu_blocks else None
        self._move_stream = MoveStream(self.device, self.places.num_places) if is_cuda else None
        if self._move_stream is not None:
            self._move_stream.hold(self.data)

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        return self.spec.bytes_per_token

    @property
    def bytes_per_block(self) -> int:
        """Return the bytes of one block in all layers of a group."""
        return self.spec.bytes_per_block // self.num_layers * self.places.num_places

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all blocks."""
        return self.bytes_per_block * self.num_blocks

    def combined(self, layer: int) -> torch.Tensor:
        """Return a layer's keys and values, (num_blocks, 2, *block_shape), contiguous: FlashInfer's shape. No copy.

        Raises `InvalidArgument` if keys and values differ in size or there are index keys.
        """
        if not self._is_even:
            raise InvalidArgument(
                f"value_size is {self.value_size} and index_size {self.index_size}; one tensor of keys and values "
                f"needs {self.head_size} (head_size) and 0"
            )
        return self.data[self.places.place(layer)]

    def key_cache(self, layer: int) -> torch.Tensor:
        """Return a view of a layer's keys, (num_blocks, *block_shape). Each block is contiguous."""
        if self._is_even:
            return self.data[self.places.place(layer), :, 0]
        return self._part(layer, slice(None, self._key_elements), self.head_size)

    def value_cache(self, layer: int) -> torch.Tensor:
        """Return a view of a layer's values, (num_blocks, *block_shape). Each block is contiguous."""
        if self._is_even:
            return self.data[self.places.place(layer), :, 1]
        return self._part(layer, slice(self._key_elements, self._key_elements + self._value_elements), self.value_size)

    def index_cache(self, layer: int) -> torch.Tensor:
        """Return a layer's index keys, (num_blocks, block_size, index_size), as a view."""
        elements = slice(self._key_elements + self._value_elements, None)
        return self.data[self.places.place(layer), :, elements].unflatten(1, (self.block_size, self.index_size))

    @property
    def _is_even(self) -> bool:
        """Return whether a block only has keys and values of equal size."""
        return self.value_size == self.head_size and self.index_size == 0

    @property
    def _key_elements(self) -> int:
        return self.block_size * self.num_kv_heads * self.head_size

    @property
    def _value_elements(self) -> int:
        return self.block_size * self.num_kv_heads * self.value_size

    def _part(self, layer: int, elements: slice, size: int) -> torch.Tensor:
        shape = self.layout.block_shape(self.block_size, self.num_kv_heads, size)
        return self.data[self.places.place(layer), :, elements].unflatten(1, shape)

    def slots(self, slot_mapping: object) -> SlotAddresses:
        """Check a plan's slot mapping once for the `write` calls of all layers. O(tokens)."""
        return SlotAddresses(slot_mapping, self.num_blocks, self.block_size, self.device)

    def tables(self, block_tables: object, seq_lens: object) -> TableAddresses:
        """Check block tables and lengths once for the `gather` calls of all layers. O(entries)."""
        return TableAddresses(block_tables, seq_lens, self.num_blocks, self.block_size, self.device)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: object) -> None:
        """Write tokens' keys and values, (tokens, num_kv_heads, size), to their slots. O(tokens).

        If a slot occurs twice, either token may win.

        Args:
            layer: number of the layer.
            key: keys of the tokens.
            value: values of the tokens.
            slots: a plan's `slot_mapping` (one integer per token), or the result of `slots()`.

        Raises:
            InvalidArgument: a slot is outside the blocks, or a shape or dtype is wrong. Nothing is written then.
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
        """Write tokens' index keys, (tokens, index_size), to their slots. O(tokens). Raises as `write` does."""
        self._require_own(slots)
        self._require_tensor("index key", keys, (slots.num_tokens, self.index_size))
        if self._move_stream is not None:
            self._move_stream.wait(self.places.place(layer))
        self.index_cache(layer)[slots.block_ids, slots.offsets] = keys

    def gather_index(self, layer: int, tables: TableAddresses) -> torch.Tensor:
        """Read sequences' index keys, (seqs, width, index_size). Entries after a sequence's end are undefined."""
        self._require_own(tables)
        ids = tables.halves[: tables.num_seqs * tables.width_blocks] // 2
        return self.index_cache(layer)[ids].view(tables.num_seqs, -1, self.index_size)

    def gather(
        self, layer: int, tables: TableAddresses, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read sequences through their block tables: keys and values, (seqs, width, num_kv_heads, size) each.

        O(tokens). The width is `tables.width_tokens`, with zeros after a sequence's end.

        Args:
            layer: number of the layer.
            tables: result of `tables()`.
            out: buffer from `new_buffer` for at least seqs * width tokens. The result is in it (for NHD without another
                copy); reusing a large buffer is up to four times faster than allocating one.
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
        """Gather keys and values of different sizes. The buffer has all keys first, then all values."""
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
        """Return gathered blocks, (rows, blocks, elements), as (rows, tokens, num_kv_heads, size)."""
        blocks = blocks.unflatten(2, self.layout.block_shape(self.block_size, self.num_kv_heads, size))
        if self.layout is KVLayout.HND:
            blocks = blocks.transpose(2, 3).contiguous()
        return blocks.flatten(1, 2)

    def new_buffer(self, num_tokens: int) -> torch.Tensor:
        """Return a buffer for gathers of up to `num_tokens` tokens, padding included."""
        num_blocks = -(-require_int("num_tokens", num_tokens, 1, 2**40) // self.block_size)
        return torch.empty((2 * num_blocks, self._half_elements), dtype=self.dtype, device=self.device)

    @property
    def _half_elements(self) -> int:
        """Return the elements of a buffer's row, half of those of a block."""
        both = self.block_size * self.num_kv_heads * (self.head_size + self.value_size)
        return -(-both // 2)

    def move_blocks(self, plan: BlockMoves) -> None:
        """Carry out a plan's swap_outs, swap_ins and copies, in this order. O(blocks).

        Each list is (n, 2), rows (from, to), for all layers. A list reads all its sources before it writes.

        Raises:
            InvalidArgument: an id is outside its pool or the null block, or a block is written twice. Nothing is moved
                then.
        """
        lists = self._checked_lists(plan)
        self.finish_moves()
        self._carry_out(lists, slice(None))

    def start_moves(self, plan: BlockMoves) -> None:
        """Start a plan's swap_outs, swap_ins and copies and, on CUDA, return at once.

        On CUDA blocks move layer by layer on a separate stream, after all work submitted before. `write` to a layer
        waits (on the device) for that layer's blocks, so the first layers compute while the last ones' blocks still
        move. Call `finish_moves` before reading blocks that a step does not write. On other devices the moves are done
        on return.

        Raises:
            InvalidArgument: an id is outside its pool or the null block, or a block is written twice. Nothing is moved
                then.
        """
        lists = self._checked_lists(plan)
        if self._move_stream is None:
            self._carry_out(lists, slice(None))
        else:
            self._move_stream.start(lambda place: self._carry_out(lists, slice(place, place + 1)))

    def finish_moves(self) -> None:
        """Make the device wait for all moves that were started before any further work."""
        if self._move_stream is not None:
            for place in range(self.places.num_places):
                self._move_stream.wait(place)

    def copy_blocks(self, copies: object) -> None:
        """Copy blocks within the pool: (n, 2), rows (old, new), as in `plan.copies`. O(n).

        Raises the errors of `move_blocks`.
        """
        self.move_blocks(MoveLists(copies=copies))

    def swap_out(self, swap_outs: object) -> None:
        """Copy blocks to the CPU pool: (n, 2), rows (block, CPU block). O(n). Raises the errors of `move_blocks`."""
        self.move_blocks(MoveLists(swap_outs=swap_outs))

    def swap_in(self, swap_ins: object) -> None:
        """Copy blocks from the CPU pool: (n, 2), rows (CPU block, block). O(n). Raises the errors of `move_blocks`."""
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
                f"of {self.dtype}: use new_buffer"
            )
        return out[:num_halves]

    def _require_own(self, addresses: object) -> None:
        if not isinstance(addresses, (SlotAddresses, TableAddresses)):
            raise InvalidArgument(f"tables is a {type(addresses).__name__}; it must be the result of tables()")
        if (addresses.num_blocks, addresses.block_size) != (self.num_blocks, self.block_size):
            raise InvalidArgument(
                f"addresses were made for {addresses.num_blocks} blocks of {addresses.block_size} tokens; this cache "
                f"has {self.num_blocks} of {self.block_size}"
            )

    def _require_tensor(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            raise InvalidArgument(
                f"{name} has shape {tuple(tensor.shape)}; it must be (tokens, num_kv_heads, elements) = {shape}"
            )
        if tensor.dtype != self.dtype:
            raise InvalidArgument(f"{name} has dtype {tensor.dtype}; the cache has {self.dtype}")


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin_memory: bool) -> torch.Tensor:
    """Return a tensor of zeros.

    In pageable CPU memory the system allocates pages on the first write, which torch.zeros would cause for all of them.
    """
    if device.type != "cpu" or pin_memory:
        return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pin_memory)
    num_bytes = math.prod(shape) * dtype.itemsize
    private = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    return torch.frombuffer(mmap.mmap(-1, num_bytes, **private), dtype=dtype).view(*shape)
