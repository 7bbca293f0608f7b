"""Sequences of one random world with states are handed over to another while both run.

Both run the program of `tests.world`: swaps, forks, cuts, failed steps, resets, resizes. An offer's blocks are read on
request, long after it was made, and must have the keys, values and states of exactly its tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import blockyard
from blockyard import Admission, BlockyardError, InvalidArgument
from blockyard_engine.parallel import (
    HandoffReceiver,
    HandoffSender,
    HeadShards,
    Offer,
    PeerInfo,
    StaleOffer,
    Transfer,
)
from blockyard_testing import seeds
from blockyard_testing.states_on_a_data_plane import StatesOnADataPlane
from blockyard_testing.world_memory import NOTHING, Seq

TTL = 60


class Side(StatesOnADataPlane):
    """One engine's world; the second one's config has the same groups."""

    def __init__(self, name: str, seed: int, first: Side | None = None) -> None:
        self.first = first
        super().__init__(blockyard, seed)
        groups = range(len(self.sizes))
        self.peer = PeerInfo.of(
            self.config,
            name,
            1,
            dtype="float32",
            num_layers=len(groups),
            head_size=1,
            shards=HeadShards.even(1),
            layer_groups=tuple((group,) for group in groups),
        )

    def choose_config(self) -> Any:
        config = super().choose_config()
        while self.first is not None:
            try:
                return replace(config, groups=self.first.config.groups)
            except InvalidArgument:  # a pool that is too small for one state
                config = super().choose_config()
        return config

    def require_hope(self, answer: str) -> None:
        """Check that blocks of offers and transfers are freed too."""

    def state_of(self, handle: int) -> int:
        """Return the name of the state in a sequence's slot."""
        return self.slots[self.cache.states.slot(handle)]


class TwoWorlds:
    """A sending and a receiving engine, and random events between an offer and its end."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.here = Side("here", self.random.randrange(2**32))
        self.there = Side("there", self.random.randrange(2**32), self.here)
        self.sender = HandoffSender(self.here.cache, self.here.peer, TTL)
        self.receiver = HandoffReceiver(self.there.cache, self.there.peer, TTL, self.there.carry_out)
        self.receiver.connect(PeerInfo.from_bytes(self.here.peer.to_bytes()))
        self.offers: list[tuple[Offer, Seq]] = []
        self.transfers: list[tuple[Transfer, Seq]] = []
        self.counts: Counter[str] = Counter()
        self.now = 0

    def offer(self) -> None:
        """Offer a sequence or a fork of it; a refused offer must hold nothing."""
        computed = self.here.cache.num_computed_tokens
        ready = [seq for seq in self.here.seqs if computed(seq.handle) >= len(seq.tokens) - 1]
        seq = self.random.choice(ready) if ready and self.random.random() < 0.9 else self.here.one()
        if seq is None or any(span.end > seq.text_from for span in seq.spans):
            return
        is_taken = self.random.random() < 0.4
        call = self.sender.take_over if is_taken else self.sender.offer
        offer = Offer.from_bytes(call(seq.handle, self.now, seq.keys + seq.spans).to_bytes())
        self.offers.append((offer, Seq(0, list(seq.tokens), seq.keys, seq.spans, seq.generation)))
        if is_taken:
            self.here.seqs.remove(seq)
        else:
            seq.num_promised = max(seq.num_promised - 1, 0)
        self.counts["offers"] += 1

    def accept(self) -> None:
        if self.offers:
            offer, seq = self.offers.pop(self.random.randrange(len(self.offers)))
            transfer = self.receiver.accept(offer, self.now)
            if isinstance(transfer, Admission):
                self.counts[transfer.name] += 1
                if transfer is Admission.LATER:
                    self.offers.append((offer, seq))
            else:
                self.transfers.append((transfer, seq))

    def fetch(self) -> None:
        """Read a request's blocks if they are still held, and finish or abort the transfer."""
        self.transfers = [each for each in self.transfers if each[0] in self.receiver.transfers()]
        if not self.transfers:
            return
        transfer, seq = self.transfers.pop(self.random.randrange(len(self.transfers)))
        offer = transfer.offer
        try:
            self.sender.require_held(offer.id, self.now)
        except StaleOffer:
            self.counts["ended before it was read"] += 1
            self.receiver.abort(transfer)
            return
        self.read(transfer, seq)
        if self.random.random() < 0.2:
            self.receiver.abort(transfer)
            self.counts["aborted"] += 1
        else:
            self.finish(transfer, seq)
        if self.random.random() < 0.8:
            self.sender.release(offer.id)

    def read(self, transfer: Transfer, seq: Seq) -> None:
        """Check that the sender's memory has these tokens, then write them at the receiver."""
        here, there, offer = self.here, self.there, transfer.offer
        old = [0, *here.names(seq, seq.tokens)]
        there_seq = Seq(transfer.seq, seq.tokens, seq.keys, seq.spans, transfer.generation)
        new = [0, *there.names(there_seq, seq.tokens)]
        for group, runs in enumerate(transfer.plan.groups):
            sent = here.gpu.blocks[group].reshape(-1)[runs.from_tokens()]
            assert sent.tolist() == old[1 + transfer.start : 1 + transfer.stop]
            slots = runs.to_tokens()
            for block in set((slots // there.sizes[group]).tolist()):
                there.write_over(block, group)
            there.gpu.blocks[group].reshape(-1)[slots] = new[1 + transfer.start : 1 + transfer.stop]
        if transfer.slot < 0:
            return
        assert here.slots[self.sender.state_slot(offer.id, self.now)] == old[transfer.stop]
        there.slots[transfer.slot] = new[transfer.stop]
        if transfer.checkpoint_tokens:
            blocks = self.sender.checkpoint_blocks(offer.id, self.now).tolist()
            assert [here.parts[block] for block in blocks] == [
                (old[offer.checkpoint_tokens], at) for at in range(len(blocks))
            ]
            self.counts["kept states sent" if blocks else "kept states gone"] += 1
            if not blocks:
                self.receiver.drop_checkpoint(transfer)
        for position, blocks in transfer.saves:
            for part, block in enumerate(blocks.tolist()):
                there.write_over(block, NOTHING)
                there.parts[block] = new[position], part
            self.counts["states kept"] += 1

    def finish(self, transfer: Transfer, seq: Seq) -> None:
        there = self.there
        is_room = len(seq.tokens) == transfer.stop < there.config.max_model_len
        token = self.random.choice((-1, 1, 2)) if is_room else -1
        handle = self.receiver.finish(transfer, self.now, token)
        got = Seq(handle, seq.tokens + ([token] if token >= 0 else []), seq.keys, seq.spans, there.cache.generation)
        got.was_read = True
        there.add(got)
        assert there.state_of(handle) == [0, *there.names(got, got.tokens)][transfer.stop]
        self.counts["finished"] += 1
        self.counts["finished with a state"] += transfer.slot >= 0

    def tick(self) -> None:
        self.now += self.random.random() < 0.3
        self.sender.expire(self.now)
        self.receiver.expire(self.now)
        self.offers = [each for each in self.offers if each[0].id in {live.id for live in self.sender.offers()}]
        for side in (self.here, self.there):
            side.run_calls(self.random.choice((0, 1, 3)))
        for happens in self.random.choices((self.offer, self.accept, self.fetch), k=2):
            try:
                happens()
            except BlockyardError as error:
                self.counts[f"{happens.__name__}: {type(error).__name__}"] += 1
            for part in (self.here.cache, self.there.cache, self.sender, self.receiver):
                part.check()

    def run(self, num_ticks: int) -> Counter[str]:
        for _ in range(num_ticks):
            self.tick()
        self.sender.close()
        self.receiver.close()
        for side in (self.here, self.there):
            side.finish()
            assert side.cache.leak_report() == []
        return self.counts


def test_states_are_handed_over_correctly_in_a_random_world() -> None:
    draw = random.Random(f"{seeds.run_seed()} states handed over")
    counts: Counter[str] = Counter()
    num_worlds = 0
    wanted = ("finished with a state", "states kept", "kept states sent", "aborted")
    while num_worlds < seeds.draws(30, 3) or not all(counts[name] for name in wanted):
        seed = draw.randrange(2**32)
        try:
            counts += TwoWorlds(seed).run(120)
        except Exception as error:
            error.add_note(f"TwoWorlds({seed})")
            raise
        num_worlds += 1
    seeds.lines.append(f"states handed over: {dict(counts)}")
