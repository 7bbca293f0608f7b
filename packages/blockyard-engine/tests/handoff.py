"""Random hand-overs: two senders, two receivers, a faulty network, and processes killed at any moment.

    python -m tests.handoff --transfers 1000000 --seed 7

Every slot of every side records what its key and value would depend on: all tokens up to its own, the extra keys, the
weights, the layer group and the head; a third of the worlds have states that record the same. Receivers read the
senders' memory at any time, as RDMA does: also when the offer has ended and the blocks hold something else. Everything
that they then share must be right, token by token; late reads must be refused. At the end, and within one ttl of every
crash, no side holds a block for a hand-over.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from blockyard import Admission, CacheSalt, CapacityError, KVCacheManager, LayerGroup, StateSpec, StepPlan
from blockyard.config import cache_config
from blockyard_engine.parallel import (
    HandoffReceiver,
    HandoffSender,
    HeadShards,
    LocalBlocks,
    Offer,
    OfferId,
    PeerInfo,
    StaleOffer,
    Transfer,
    TransferPlan,
    fetch,
)
from blockyard_testing import damaged_bytes as damage
from blockyard_testing.seeds import run_seed

LEASE = 40
KEYS: tuple[tuple[Any, ...], ...] = ((), (CacheSalt("a"),))
_MIX = np.random.default_rng(1).integers(1, 2**63, (64, 4), dtype=np.uint64) | np.uint64(1)
Names = npt.NDArray[np.uint64]


def names_of(tokens: npt.NDArray[np.int32], keys: int, weights: int) -> Names:
    """Return a number for each token that depends on it, all earlier ones, the keys and the weights."""
    places = np.arange(1, len(tokens) + 1, dtype=np.uint64)
    first = np.uint64((weights * 131 + keys * 17 + 1) * 0x9E3779B97F4A7C15 % 2**64)
    named: Names = np.cumsum(_MIX[tokens % 64, keys % 4] * (2 * places + 1), dtype=np.uint64) + first
    return named


class Node:
    """One process: a cache, and the contents of its memory."""

    def __init__(self, world: World, name: str, is_sender: bool) -> None:
        self.world = world
        self.name = name
        self.is_sender = is_sender
        draw = world.random
        self.incarnation = 0
        sizes = [draw.choice([1, 2, 3, 4, 8]) for _ in range(world.num_groups)]
        groups = [LayerGroup(size, token_bytes=8) for size in sizes]
        if world.has_states:
            groups.append(StateSpec(state_bytes=40, checkpoint_every=draw.choice(sizes)))
        num_blocks, cuts_chunks = draw.randrange(40, 160), draw.random() < 0.7
        self.config = cache_config(
            num_blocks=num_blocks,
            max_num_seqs=32,
            max_model_len=96,
            hash_seed=1,
            groups=tuple(groups),
            **({"cut_chunks": cuts_chunks} if world.has_states else {}),
        )
        self.shards = HeadShards.even(world.num_heads, 1 if world.has_states else draw.choice([1, 2, 3]))
        self.start()

    def start(self) -> None:
        """Start as a new process does, with garbage in its memory."""
        self.incarnation += 1
        self.cache = KVCacheManager(self.config)
        self.peer = PeerInfo.of(
            self.config,
            self.name,
            self.incarnation,
            dtype="uint64",
            num_layers=self.world.num_groups,
            head_size=1,
            shards=self.shards,
            layer_groups=tuple((group,) for group in range(self.world.num_groups)),
        )
        self.memory = [
            [LocalBlocks(self.config.num_blocks, group.block_size, heads, 1, np.uint64) for group in self.peer.groups]
            for _, heads in self.shards.ranges
        ]
        #: The name of the state in each slot, 0 of no tokens, and of a kept one and its part in each block.
        self.slots: dict[int, int] = {}
        self.parts: dict[int, tuple[int, int]] = {}
        self.seqs: list[tuple[int, int]] = []
        self.transfers: list[list[Any]] = []
        if self.is_sender:
            self.sender = HandoffSender(self.cache, self.peer, LEASE)
        else:
            self.receiver = HandoffReceiver(self.cache, self.peer, LEASE, self.carry_out)

    def carry_out(self, plan: StepPlan) -> None:
        """Carry out a plan's moves of states."""
        for source, target in plan.states.copies.tolist():
            self.slots[target] = self.slots[source]
        for slot in plan.states.clears.tolist():
            self.slots[slot] = 0
        for slot, blocks in zip(plan.states.loads.tolist(), plan.states.load_blocks.tolist(), strict=True):
            self.slots[slot] = self.kept(blocks)

    def kept(self, blocks: list[int]) -> int:
        """Return the name of the checkpoint whose parts are in these blocks."""
        parts = [self.parts.get(block, (-1, -1)) for block in blocks]
        if [part for _, part in parts] != list(range(len(parts))) or len({name for name, _ in parts}) != 1:
            raise AssertionError(f"{self.name} loads the parts {parts}; {self.world.about()}")
        return parts[0][0]

    def keep(self, name: int, blocks: list[int]) -> None:
        """Write a checkpoint."""
        self.parts.update((block, (name, part)) for part, block in enumerate(blocks))

    def state_after(self, seq: int, keys: int, stop: int) -> int:
        """Return the name of the state after the first tokens of a sequence."""
        return int(names_of(self.cache.token_ids(seq), keys, self.world.weights)[stop - 1]) if stop else 0

    def write_over(self, seq: int, start: int) -> None:
        """Remove the states in blocks that keys and values from a token on overwrite."""
        for group, each in enumerate(self.peer.groups):
            for block in self.cache.block_ids(seq, group)[start // each.block_size :].tolist():
                self.parts.pop(block, None)

    def compute_states(self, plan: StepPlan, seq: int, keys: int) -> None:
        """Advance the state of one sequence by a step, and checkpoint it as planned."""
        slot, start, count = int(plan.rows[0]), int(plan.num_computed[0]), int(plan.num_scheduled[0])
        if self.slots[slot] != self.state_after(seq, keys, start):
            raise AssertionError(f"{self.name} goes on from the state of others; {self.world.about()}")
        self.slots[slot] = self.state_after(seq, keys, start + count)
        for position, blocks in zip(plan.states.save_positions.tolist(), plan.states.save_blocks.tolist(), strict=True):
            self.keep(self.state_after(seq, keys, position), blocks)

    def token_slots(self, seq: int, group: int, stop: int) -> npt.NDArray[np.int64]:
        size = self.peer.groups[group].block_size
        positions = np.arange(stop)
        slots: npt.NDArray[np.int64] = self.cache.block_ids(seq, group)[positions // size] * size + positions % size
        return slots

    def write(self, seq: int, keys: int, start: int, stop: int) -> None:
        """Write the keys and values of a step for the tokens from `start` to `stop`."""
        names = names_of(self.cache.token_ids(seq), keys, self.world.weights)[:stop]
        for group in range(self.world.num_groups):
            slots = self.token_slots(seq, group, len(names))[start:]
            for (first, count), blocks in zip(self.shards.ranges, self.memory, strict=True):
                heads = np.arange(first, first + count, dtype=np.uint64) + np.uint64(group * 64)
                blocks[group].data[slots, :, 0] = names[start:, None] + heads

    def require_right(self, seq: int, keys: int, stop: int) -> None:
        if not self.is_right(seq, keys, stop):
            raise AssertionError(f"{self.name} reads wrong keys and values; {self.world.about()}")

    def is_right(self, seq: int, keys: int, stop: int) -> bool:
        """Return whether all tokens that attention would read are this sequence's, in every head of every group."""
        names = names_of(self.cache.token_ids(seq), keys, self.world.weights)[:stop]
        for group in range(self.world.num_groups):
            slots = self.token_slots(seq, group, stop)
            for (first, count), blocks in zip(self.shards.ranges, self.memory, strict=True):
                heads = np.arange(first, first + count, dtype=np.uint64) + np.uint64(group * 64)
                if not np.array_equal(blocks[group].data[slots, :, 0], names[:, None] + heads):
                    return False
        return True

    def prefill(self) -> int | None:
        """Compute a prompt as an engine does, and check its hit; return None if it does not fit."""
        tokens, keys = self.world.prompt()
        seq = self.cache.try_allocate(tokens, extra_keys=KEYS[keys])
        if isinstance(seq, Admission):
            return None
        start = int(self.cache.num_computed_tokens(seq))
        while start < len(tokens):
            plan = self.cache.reserve([seq])
            self.carry_out(plan)
            if not plan.all_fit:  # it waits for a transfer's blocks
                self.cache.free(seq)
                return None
            self.require_right(seq, keys, start)
            stop = start + int(plan.num_scheduled[0])
            self.write_over(seq, start)
            self.write(seq, keys, start, stop)
            if self.world.has_states:
                self.compute_states(plan, seq, keys)
            is_last = stop == len(tokens)
            self.cache.commit([seq], stop - start, self.world.random.randrange(64) if is_last else None)
            start = stop
        self.seqs.append((seq, keys))
        self.world.counts["prefills"] += 1
        return seq

    def drop(self, number: int) -> None:
        self.cache.free(self.seqs.pop(number)[0])

    def drop_all(self) -> None:
        while self.seqs:
            self.drop(-1)


class World:
    """The nodes, the network between them, and a random program that drives all."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.num_heads = self.random.choice([1, 2, 3, 6])
        self.num_groups = self.random.choice([1, 1, 2])
        self.has_states = self.random.random() < 0.35
        self.weights = 1
        self.now = 0
        self.counts: Counter[str] = Counter()
        self.stems = [self._tokens(self.random.randrange(4, 40)) for _ in range(6)]
        self.senders = [Node(self, f"sender {number}", True) for number in range(2)]
        self.receivers = [Node(self, f"receiver {number}", False) for number in range(2)]
        self.nodes = {node.name: node for node in [*self.senders, *self.receivers]}
        #: (time, what arrives), not sorted; few at a time.
        self.network: list[tuple[int, Callable[[], None]]] = []
        self.last_message = b"no message"
        for sender in self.senders:
            self.greet(sender)
        #: Kinds of things that happen, with their weights.
        self.kinds: list[tuple[Callable[[], None], int]] = [
            (self.offer, 30), (self.read, 60), (self.prefill_somewhere, 12), (self.free_somewhere, 16),
            (self.withdraw, 1), (self.abort, 2), (self.renew, 3), (self.finish_unasked, 1),
        ]  # fmt: skip
        self.draws = self.random.choices

    def about(self) -> str:
        return f"seed {self.seed}, time {self.now}, {dict(self.counts)}"

    def _tokens(self, count: int) -> npt.NDArray[np.int32]:
        return np.array([self.random.randrange(64) for _ in range(count)], np.int32)

    def prompt(self) -> tuple[npt.NDArray[np.int32], int]:
        stem = self.random.choice(self.stems)
        cut = stem[: self.random.randrange(1, len(stem) + 1)]
        return np.concatenate([cut, self._tokens(self.random.randrange(1, 16))]), self.random.choice([0, 0, 0, 1])

    # The network.

    def send(self, arrives: Callable[[], None]) -> None:
        chance = self.random.random()
        if chance < 0.04:
            self.counts["lost"] += 1
            return
        copies = 2 if chance > 0.96 else 1
        self.counts["repeated"] += copies - 1
        for _ in range(copies):
            delay = self.random.choice([0, 0, 1, 1, 2, 5, 2 * LEASE if self.random.random() < 0.05 else 3])
            self.network.append((self.now + delay, arrives))

    def deliver(self) -> None:
        due = [arrives for when, arrives in self.network if when <= self.now]
        self.network = [message for message in self.network if message[0] > self.now]
        for arrives in due:
            arrives()

    def read_message(self, read: Callable[[Any], Any], message: bytes) -> Any:
        """Read a message as its receiver does; sometimes a damaged copy comes first, which must be refused."""
        if self.random.random() < 0.1:
            draw, other = self.random, self.last_message
            changed = draw.choice(damage.DAMAGES)(draw, message, other)
            if changed not in (message, other):
                try:
                    read(changed)
                except damage.REFUSED:
                    self.counts["damaged messages refused"] += 1
                else:
                    raise AssertionError(f"{self.about()}: a damaged message was believed")
        self.last_message = message
        return read(message)

    def greet(self, sender: Node) -> None:
        """Deliver the handshake of this start of a sender to every receiver, at some time."""
        message = sender.peer.to_bytes()
        for receiver in self.receivers:
            self.network.append((self.now + self.random.randrange(4), lambda to=receiver: self.on_hello(to, message)))

    def on_hello(self, receiver: Node, message: bytes) -> None:
        try:
            receiver.receiver.connect(self.read_message(PeerInfo.from_bytes, message))
        except StaleOffer:
            self.counts["late hellos"] += 1
        self.forget_ended(receiver)

    # What senders do.

    def offer(self) -> None:
        sender = self.random.choice(self.senders)
        seq = sender.prefill()
        if seq is None:
            if sender.seqs:
                sender.drop(self.random.randrange(len(sender.seqs)))
            return
        keys = sender.seqs[-1][1]
        try:
            offer = sender.sender.offer(seq, self.now, KEYS[keys])
        except CapacityError:
            self.counts["no row for an offer"] += 1
            return
        self.counts["offers"] += 1
        message = offer.to_bytes()
        receiver = self.random.choice(self.receivers)
        self.send(lambda: self.on_offer(receiver, message, keys))
        if self.random.random() < 0.7:
            sender.drop(len(sender.seqs) - 1)

    def on_asked(self, sender: Node, message: bytes, receiver: Node, transfer: Transfer) -> None:
        """Answer a receiver that has read everything and asks whether the offer was held."""
        states: list[int | None] = []
        try:
            offer_id = OfferId.from_bytes("read", message)
            sender.sender.require_held(offer_id, self.now)
            is_held = True
            if transfer.slot >= 0:
                states.append(sender.slots[sender.sender.state_slot(offer_id, self.now)])
            if transfer.checkpoint_tokens:
                blocks = sender.sender.checkpoint_blocks(offer_id, self.now).tolist()
                states.insert(0, sender.kept(blocks) if blocks else None)
        except StaleOffer:
            is_held = False
        self.send(lambda: self.on_answer(receiver, transfer, is_held, states))

    def withdraw(self) -> None:
        sender = self.random.choice(self.senders)
        if sender.sender.num_offers:
            sender.sender.release(self.random.choice(sender.sender.offers()).id)
            self.counts["withdrawn"] += 1

    # What receivers do.

    def on_offer(self, receiver: Node, message: bytes, keys: int) -> None:
        offer = self.read_message(Offer.from_bytes, message)
        if any(entry[0].offer.id == offer.id for entry in receiver.transfers):
            return  # a message that came twice
        try:
            transfer = receiver.receiver.accept(offer, self.now, "transfer")
        except StaleOffer:
            self.counts["offers of an earlier start"] += 1
            return
        except Exception as error:
            if "which is not connected" not in str(error):
                raise
            return
        finally:
            self.forget_ended(receiver)
        if isinstance(transfer, Admission):
            self.counts["no room at the receiver"] += 1
            return
        self.counts["transfers"] += 1
        self.counts["tokens hit"] += transfer.start
        self.counts["tokens fetched"] += transfer.stop - transfer.start
        if self.has_states:
            receiver.write_over(transfer.seq, transfer.start)
        if transfer.start:
            receiver.require_right(transfer.seq, keys, transfer.start)
        receiver.transfers.append([transfer, keys, list(transfer.plan.heads), receiver.incarnation])

    def read(self) -> None:
        """Fetch the heads of some pairs of ranks; then ask the sender."""
        receiver = self.random.choice(self.receivers)
        if not receiver.transfers:
            return
        transfer, _, heads, _ = self.random.choice(receiver.transfers)
        sender = self.nodes[transfer.offer.id.sender]
        for _ in range(self.random.choice([1, len(heads), len(heads)])):
            if heads:
                fetch(TransferPlan(transfer.plan.groups, (heads.pop(),)), sender.memory, receiver.memory)
        if not heads:
            self.counts["reads"] += 1
            message = transfer.offer.id.to_bytes("read")
            self.send(lambda: self.on_asked(sender, message, receiver, transfer))

    def on_answer(self, receiver: Node, transfer: Transfer, is_held: bool, states: list[int | None]) -> None:
        entry = next((entry for entry in receiver.transfers if entry[0] is transfer), None)
        if entry is None:
            return  # it was aborted, has expired, or is of an earlier start
        receiver.transfers.remove(entry)
        if not is_held:
            self.counts["of which wrong bytes"] += not receiver.is_right(transfer.seq, entry[1], transfer.stop)
            assert receiver.receiver.abort(transfer)
            self.counts["late reads refused"] += 1
            return
        self.put_states(receiver, transfer, states)
        self._finish(receiver, transfer, entry[1])

    def put_states(self, receiver: Node, transfer: Transfer, states: list[int | None]) -> None:
        """Put the sender's states in the slot and in the blocks of the checkpoints."""
        if len(states) > 1 and states[0] is None:
            receiver.receiver.drop_checkpoint(transfer)
            self.counts["kept states gone"] += 1
        for position, state in zip(
            [transfer.offer.checkpoint_tokens, transfer.stop][2 - len(states) :], states, strict=True
        ):
            if state is None:
                continue
            receiver.slots[transfer.slot] = state
            for place, blocks in transfer.saves:
                if place == position:
                    receiver.keep(state, blocks.tolist())
                    self.counts["states kept"] += 1

    def _finish(self, receiver: Node, transfer: Transfer, keys: int) -> None:
        try:
            seq = receiver.receiver.finish(transfer, self.now, self.random.choice([-1, 5]))
        except StaleOffer:
            self.counts["finished too late"] += 1
            self.forget_ended(receiver)
            return
        receiver.require_right(seq, keys, transfer.stop)
        if self.has_states:
            state = receiver.slots[receiver.cache.states.slot(seq)]
            assert state == receiver.state_after(seq, keys, transfer.stop), self.about()
            self.counts["finished with a state"] += 1
        receiver.seqs.append((seq, keys))
        self.counts["finished"] += 1
        sender = self.nodes[transfer.offer.id.sender]
        message = transfer.offer.id.to_bytes("release")
        self.send(lambda: self.on_release(sender, message))

    def on_release(self, sender: Node, message: bytes) -> None:
        if not sender.sender.release(self.read_message(lambda data: OfferId.from_bytes("release", data), message)):
            self.counts["releases of what had ended"] += 1

    def abort(self) -> None:
        receiver = self.random.choice(self.receivers)
        if receiver.transfers:
            transfer = receiver.transfers.pop(self.random.randrange(len(receiver.transfers)))[0]
            assert receiver.receiver.abort(transfer)
            assert not receiver.receiver.abort(transfer)
            self.counts["aborted"] += 1

    def finish_unasked(self) -> None:
        """Finish a transfer that has ended, by mistake; this must be refused."""
        receiver = self.random.choice(self.receivers)
        if receiver.transfers:
            transfer = receiver.transfers.pop()[0]
            receiver.receiver.abort(transfer)
            for call in (receiver.receiver.finish, receiver.receiver.renew):
                try:
                    call(transfer, self.now)
                except StaleOffer:
                    continue
                raise AssertionError(f"an aborted transfer went on; {self.about()}")

    def renew(self) -> None:
        receiver = self.random.choice(self.receivers)
        if receiver.transfers:
            transfer = self.random.choice(receiver.transfers)[0]
            sender = self.nodes[transfer.offer.id.sender]
            try:
                receiver.receiver.renew(transfer, self.now)
                sender.sender.renew(transfer.offer.id, self.now)
            except StaleOffer:
                self.counts["renewed too late"] += 1
            self.forget_ended(receiver)

    def forget_ended(self, receiver: Node) -> None:
        live = {id(transfer) for transfer in receiver.receiver.transfers()}
        receiver.transfers = [entry for entry in receiver.transfers if id(entry[0]) in live]

    # What anybody does.

    def prefill_somewhere(self) -> None:
        node = self.random.choice(list(self.nodes.values()))
        if node.prefill() is None and node.seqs:
            node.drop(0)

    def free_somewhere(self) -> None:
        node = self.random.choice(list(self.nodes.values()))
        if node.seqs:
            node.drop(self.random.randrange(len(node.seqs)))

    def crash(self) -> None:
        """kill -9: nothing is freed and no one is notified; others hold blocks for it for one ttl at most."""
        node = self.random.choice(list(self.nodes.values()))
        node.start()
        self.counts["crashes"] += 1
        if node.is_sender:
            self.greet(node)
        else:
            for sender in self.senders:
                self.greet(sender)

    def reload(self) -> None:
        """Load new weights on all nodes; nothing computed with the old ones may be shared."""
        self.weights += 1
        for node in self.nodes.values():
            node.drop_all()
            node.cache.reset_prefix_cache()
        self.counts["reloads"] += 1

    # Time.

    def tick(self) -> None:
        self.now += 1
        for sender in self.senders:
            self.counts["offers expired"] += len(sender.sender.expire(self.now))
        for receiver in self.receivers:
            ended = receiver.receiver.expire(self.now)
            self.counts["transfers expired"] += len(ended)
            if ended:
                self.forget_ended(receiver)
        self.deliver()
        for happens in self.draws(*zip(*self.kinds, strict=True), k=4):
            happens()
        chance = self.random.random()
        if chance < 0.012:
            self.crash()
        elif chance < 0.016:
            self.reload()

    def check(self) -> None:
        """Check every invariant of every side, and all holders."""
        for node in self.nodes.values():
            node.cache.check()
            handoffs = node.sender.num_offers if node.is_sender else node.receiver.num_transfers
            (node.sender if node.is_sender else node.receiver).check()
            assert node.cache.num_seqs == len(node.seqs) + handoffs, f"{node.name} leaks; {self.about()}"

    def end(self) -> None:
        """End all work; one ttl later no block is held for a hand-over, though no one was notified."""
        self.check()
        self.network.clear()
        self.now += LEASE
        for node in self.nodes.values():
            node.sender.expire(self.now) if node.is_sender else node.receiver.expire(self.now)
            node.drop_all()
            node.cache.check()
            assert node.cache.leak_report() == [], f"{node.name} leaks; {self.about()}"
            assert node.cache.num_used_blocks == 0


def run(num_transfers: int, seed: int, ticks_a_world: int = 2000) -> Counter[str]:
    """Run worlds until `num_transfers` transfers were started; return the counts of all events."""
    counts: Counter[str] = Counter()
    draw = random.Random(seed)
    while counts["transfers"] < num_transfers:
        world = World(draw.randrange(2**32))
        for number in range(ticks_a_world):
            world.tick()
            if number % 100 == 0:
                world.check()
            if counts["transfers"] + world.counts["transfers"] >= num_transfers:
                break
        world.end()
        counts += world.counts
        counts["worlds"] += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transfers", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = run_seed() if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    began = time.perf_counter()
    counts = run(options.transfers, seed)
    print(
        f"{time.perf_counter() - began:.0f} s, seed {seed}: " + ", ".join(f"{n} {k}" for k, n in sorted(counts.items()))
    )


if __name__ == "__main__":
    main()
