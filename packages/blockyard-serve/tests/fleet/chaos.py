"""A fleet under faults: `python -m tests.fleet.chaos --minutes 10 --seed 7`, about two cores and 4 GiB.

`blockyard fleet serve` is started with a tiny model, and OpenAI's client sends turns of conversations: streamed or
whole, greedy or sampled, several completions, log probabilities, stop strings, clients that leave. The number of
clients changes each minute, and the number of engines with it. Meanwhile engines and ingresses are killed and stopped,
and Ray's controller is killed. Every answer must be that of a single undisturbed engine. Where it is another one, each
of its tokens must be the choice from exact logits but for rounding (`support.exact_draws`): such answers count as ties,
others as wrong, and are printed whole. None may fail, but those in flight when an ingress was killed: they are sent
again. At the end of each minute the load stops, and each ingress' mirror and book are compared with what the engines
hold. The seed is printed; it repeats requests and faults, not the machine's timing.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil

from blockyard_engine import Engine, FinishReason, GenerationResult, SamplingParams
from blockyard_testing.exact_draws import ROUNDING, distances, exact
from blockyard_testing.patience import PATIENCE_SECONDS
from blockyard_testing.tiny_models import NUM_TOKENS, letter_tokenizer, tiny_folder, tiny_model

from ..support.fleets import MODEL, RunningFleet, running_fleet

MAX_LEN = 2048
#: Seconds that a fleet has to be whole again, its replicas new and its mirror right; as long as it has for an answer.
RECOVERY = 600.0
#: How often one request may be in flight when an ingress is killed.
MOST_BROKEN = 8
ENGINES, INGRESSES, CONTROLLER = "ServeReplica:blockyard:engine", "ServeReplica:blockyard:ingress", "ServeController"


@dataclass
class Tally:
    """What was seen.

    ties: completions that part from the single engine's by rounding, wrong: by more. gaps: the longest time in seconds
    from one piece of a stream to the next, of each stream. ingress_kills: when, on the clock of `time.monotonic`.
    sizes: how often so many engines were seen.
    """

    answers: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    ties: list[dict[str, Any]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    ingress_kills: list[float] = field(default_factory=list)
    sizes: Counter[int] = field(default_factory=Counter)
    compared: int = 0
    checks: int = 0
    bad_checks: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Wanted:
    """One request, and what it is called."""

    kind: str
    prompt: tuple[int, ...]
    fields: dict[str, Any]
    is_streamed: bool
    leaves: bool

    def sampling(self) -> SamplingParams:
        """The same, as the engine takes it."""
        fields = dict(self.fields)
        stop = tuple(fields.pop("stop", ()))
        return SamplingParams(**fields, stop=stop, ignore_eos=True)


class Chats:
    """Draws requests: turns of conversations on a few long beginnings."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._beginnings = [[rng.randrange(256) for _ in range(rng.randrange(60, 400))] for _ in range(6)]
        self._chats = [list(rng.choice(self._beginnings)) for _ in range(12)]

    def draw(self) -> Wanted:
        """The next turn of a chat; one that has grown long begins anew."""
        rng, number = self._rng, self._rng.randrange(len(self._chats))
        chat = self._chats[number]
        if len(chat) > 1200:
            chat = self._chats[number] = list(rng.choice(self._beginnings))
        chat += [rng.randrange(256) for _ in range(rng.randrange(5, 60))]
        fields: dict[str, Any] = {
            "max_tokens": rng.randrange(20, 300),
            "temperature": 0.0,
            "seed": rng.randrange(2**31),
        }
        kind = rng.choice(["greedy", "sampled", "sampled", "penalized", "two", "logprobs", "stop"])
        if kind != "greedy":
            fields["temperature"] = rng.choice([0.6, 1.0])
        if kind == "penalized":
            fields |= {"frequency_penalty": 0.5, "top_p": 0.9, "min_tokens": 5}
        if kind == "two":
            fields |= {"n": 2, "max_tokens": 60}
        if kind == "logprobs":
            fields |= {"logprobs": 2, "max_tokens": 60}
        if kind == "stop":
            fields["stop"] = ["ab", "the", "x"]
        return Wanted(kind, tuple(chat), fields, rng.random() < 0.7, rng.random() < 0.08)


#: Text and reason of a completion, as a client has them.
Said = tuple[str, str | None]


class Judge:
    """Says what a single engine answers, one prompt at a time, and what is to be said of another answer."""

    def __init__(self) -> None:
        model = tiny_model("llama-gqa", vocab_size=NUM_TOKENS, max_position_embeddings=MAX_LEN)
        self._exact_model = exact(model)
        self._tokenizer = letter_tokenizer()
        self._engine = Engine(model, self._tokenizer, num_blocks=400, max_num_seqs=8)
        self._lock = asyncio.Lock()

    async def answer(self, wanted: Wanted) -> GenerationResult:
        """The answer that is right."""
        async with self._lock:
            found = await asyncio.to_thread(self._engine.generate, [list(wanted.prompt)], wanted.sampling())
        return found[0]

    async def differences(self, wanted: Wanted, expected: GenerationResult, found: list[Said]) -> list[dict[str, Any]]:
        """For each completion that is another one: its tokens, where they part, and whether rounding parts them."""
        async with self._lock:
            return await asyncio.to_thread(self._differences, wanted, expected, found)

    def _differences(self, wanted: Wanted, expected: GenerationResult, found: list[Said]) -> list[dict[str, Any]]:
        answers = zip(found, _said(expected), expected.completions, strict=True)
        return [
            self._difference(wanted, index, right.token_ids, own)
            for index, (own, said, right) in enumerate(answers)
            if own != said
        ]

    def _difference(self, wanted: Wanted, index: int, expected: list[int], found: Said) -> dict[str, Any]:
        sampling = wanted.sampling()
        text, reason = found
        tokens = self._tokens(text)
        # A stop string is not in the text that it ends.
        wholes = [tokens + self._tokens(stop) for stop in sampling.stop] if reason == FinishReason.STOP else [tokens]
        judged = [(distances(self._exact_model, wanted.prompt, whole, sampling, index), whole) for whole in wholes]
        far, whole = min(judged, key=lambda each: max(each[0], default=0.0))
        own = distances(self._exact_model, wanted.prompt, expected, sampling, index)
        pairs = itertools.zip_longest(whole, expected)
        place = next((number for number, (one, right) in enumerate(pairs) if one != right), len(whole))
        is_whole = reason == FinishReason.STOP or len(whole) == sampling.max_tokens
        is_first_stop = all(stop not in text for stop in sampling.stop)
        largest = max(far + own, default=0.0)
        return {
            "kind": wanted.kind,
            "is_tie": is_whole and is_first_stop and largest <= ROUNDING,
            "place": place,
            "distance": max(far[place : place + 1] + own[place : place + 1], default=None),
            "largest": largest,
            "completion": index,
            "streamed": wanted.is_streamed,
            "fields": wanted.fields,
            "prompt": list(wanted.prompt),
            "expected": expected,
            "found": whole,
            "reason": reason,
        }

    def _tokens(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.convert_tokens_to_ids(list(text))
        return tokens


def _said(result: GenerationResult) -> list[Said]:
    return [(each.text, str(each.finish_reason)) for each in result.completions]


async def ask(client: openai.AsyncOpenAI, wanted: Wanted, tally: Tally) -> list[Said] | None:
    """Text and reason of each completion; None where this client left on purpose."""
    fields = {"model": MODEL, "prompt": list(wanted.prompt), "extra_body": {}, **wanted.fields}
    fields["extra_body"] = {"ignore_eos": True}
    if "min_tokens" in fields:
        fields["extra_body"]["min_tokens"] = fields.pop("min_tokens")
    if not wanted.is_streamed:
        whole = await client.completions.create(**fields)
        return [(choice.text, choice.finish_reason) for choice in whole.choices]
    texts: list[str] = [""] * wanted.fields.get("n", 1)
    reasons: list[str | None] = [None] * len(texts)
    last_at, longest, number = time.monotonic(), 0.0, 0
    stream = await client.completions.create(stream=True, **fields)
    async for piece in stream:
        now, number = time.monotonic(), number + 1
        longest, last_at = max(longest, now - last_at), now
        for choice in piece.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        if wanted.leaves and number > 10:
            await stream.close()
            return None
    tally.gaps.append(longest)
    return list(zip(texts, reasons, strict=True))


class Cut(Exception):
    """A stream that ended without a reason."""


async def ask_until_whole(client: openai.AsyncOpenAI, wanted: Wanted, tally: Tally) -> list[Said] | None:
    """As `ask`; what broke because an ingress was killed meanwhile is asked again."""
    for number in itertools.count(1):
        began = time.monotonic()
        try:
            found = await ask(client, wanted, tally)
            if found is not None and any(reason is None for _, reason in found):
                raise Cut
            return found
        except (openai.OpenAIError, httpx2.HTTPError, Cut):
            if not any(began < at for at in tally.ingress_kills) or number > MOST_BROKEN:
                raise
            tally.answers["broken with their ingress"] += 1
            await asyncio.sleep(0.5)
    raise AssertionError


async def client_loop(
    address: str, chats: Chats, judge: Judge, tally: Tally, may_run: asyncio.Event, until: float
) -> None:
    """Send requests, one after another, and compare each answer."""
    async with openai.AsyncOpenAI(
        base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=RECOVERY + 20
    ) as client:
        while time.monotonic() < until:
            await may_run.wait()
            wanted = chats.draw()
            expected = await judge.answer(wanted)
            try:
                found = await ask_until_whole(client, wanted, tally)
            except (openai.OpenAIError, httpx2.HTTPError, Cut) as error:
                tally.failed.append(f"{wanted.kind}: {type(error).__name__}: {str(error)[:200]}")
                continue
            if found is None:
                tally.answers["left"] += 1
                continue
            tally.answers[wanted.kind] += 1
            if found == _said(expected):
                continue
            differences = await judge.differences(wanted, expected, found)
            for each in differences:
                (tally.ties if each["is_tie"] else tally.wrong).append(each)
                shown = ("kind", "place", "distance", "largest", "streamed", "fields")
                print("tie" if each["is_tie"] else "wrong", json.dumps({name: each[name] for name in shown}))
                if not each["is_tie"]:
                    print("its tokens", json.dumps({name: each[name] for name in ("prompt", "expected", "found")}))


class Faults:
    """Kills and stops processes of the fleet."""

    def __init__(self, fleet: RunningFleet, rng: random.Random, tally: Tally) -> None:
        self._fleet, self._rng, self._tally = fleet, rng, tally

    def processes(self, name: str) -> list[psutil.Process]:
        """Those whose title has a name."""
        found = []
        for each in self._fleet.process.children(recursive=True):
            try:
                if name in " ".join(each.cmdline()):
                    found.append(each)
            except psutil.Error:
                continue
        return found

    async def loop(self, until: float, may_run: asyncio.Event) -> None:
        """Do harm every few seconds."""
        while time.monotonic() < until:
            await asyncio.sleep(self._rng.uniform(4, 14))
            if may_run.is_set():
                await self.harm()

    async def harm(self) -> None:
        """Kill or stop one."""
        kinds = {"kill": 5, "stop long": 3, "stop short": 3, "kill controller": 1}
        kinds |= {"kill ingress": 2, "stop ingress": 1} if self.processes(INGRESSES) else {}
        (what,) = self._rng.choices(list(kinds), list(kinds.values()))
        name = CONTROLLER if what == "kill controller" else INGRESSES if "ingress" in what else ENGINES
        found = self.processes(name)
        if not found:
            return
        chosen = self._rng.choice(found)
        self._tally.faults[what] += 1
        if what.startswith("kill"):
            chosen.kill()
            if name == INGRESSES:
                self._tally.ingress_kills.append(time.monotonic())
            return
        os.kill(chosen.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(self._rng.uniform(6, 12) if what == "stop long" else self._rng.uniform(0.5, 2.5))
        finally:
            if chosen.is_running():
                os.kill(chosen.pid, signal.SIGCONT)

    async def watch(self, until: float) -> None:
        """Count the engines now and again."""
        while time.monotonic() < until:
            self._tally.sizes[len(self.processes(ENGINES))] += 1
            await asyncio.sleep(5)

    def memory(self) -> int:
        """MiB of the largest process that is no engine: an ingress, as a rule."""
        sizes = [0]
        for each in [self._fleet.process, *self.processes(INGRESSES)]:
            with suppress(psutil.Error):
                sizes.append(each.memory_info().rss >> 20)
        return max(sizes)


async def compare(fleet: RunningFleet, tally: Tally, options: argparse.Namespace) -> None:
    """Wait until the fleet is whole again; then all mirrors and books must be the truth."""
    deadline, answer = time.monotonic() + RECOVERY, {}
    is_right = False
    while time.monotonic() < deadline and not is_right:
        try:
            state = await asyncio.to_thread(fleet.get, "/fleet")
            trusts = [each["trust"] for each in state["replicas"]]
            if set(trusts) == {"live"} and options.replicas <= len(trusts) <= options.max_replicas:
                answer = await asyncio.to_thread(fleet.check)
                ingresses = answer.get("ingresses")
                is_right = bool(answer.get("ok")) and answer["booked"] == 0 and ingresses == max(options.ingresses, 1)
        except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
            answer = {"error": repr(error)}
        await asyncio.sleep(0.5)
    tally.checks += 1
    if is_right:
        tally.compared += answer["compared"]
    else:
        tally.bad_checks.append(answer or "the fleet was not whole in time")


async def play(fleet: RunningFleet, options: argparse.Namespace, tally: Tally) -> None:
    """Run it minute by minute."""
    rng = random.Random(options.seed)
    chats, judge, may_run = Chats(rng), Judge(), asyncio.Event()
    until = time.monotonic() + 60 * options.minutes
    faults = Faults(fleet, random.Random(options.seed + 1), tally)
    for minute in itertools.count(1):
        if time.monotonic() >= until:
            break
        may_run.set()
        end = min(time.monotonic() + 60, until)
        number = rng.randrange(1, options.clients + 1)
        clients = [client_loop(fleet.address, chats, judge, tally, may_run, end) for _ in range(number)]
        await asyncio.gather(faults.loop(end, may_run), faults.watch(end), *clients)
        may_run.clear()
        began = time.monotonic()
        await compare(fleet, tally, options)
        print(
            f"minute {minute}: {tally.answers.total()} answers, {len(tally.wrong)} wrong, {len(tally.ties)} ties, "
            f"{len(tally.failed)} failed, "
            f"faults {dict(tally.faults)}; whole again after {time.monotonic() - began:.1f} s, {tally.compared} "
            f"comparisons, {len(tally.bad_checks)} bad checks; engines {dict(tally.sizes)}, ingress "
            f"{faults.memory()} MiB",
            flush=True,
        )


def main() -> int:
    """Run it and report; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--max-replicas", type=int, default=3)
    parser.add_argument("--ingresses", type=int, default=2, help="0: the command itself")
    parser.add_argument("--clients", type=int, default=8, help="at most")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    tally = Tally()
    with tempfile.TemporaryDirectory() as work:
        folder = tiny_folder(Path(work), MAX_LEN)
        letter_tokenizer().save_pretrained(folder)
        arguments = ["--replicas", str(options.replicas), "--num-blocks", "400", "--check-endpoint"]
        arguments += ["--max-replicas", str(options.max_replicas), "--ingresses", str(options.ingresses)]
        arguments += ["--token-load", "0.2", "--idle-seconds", "20"]
        with running_fleet(folder, *arguments) as fleet:
            asyncio.run(play(fleet, options, tally))
            state = fleet.get("/fleet")
            ours = [fleet.process, *fleet.process.children(recursive=True)]
        left = left_of(ours)
    report(tally, state, left)
    return 1 if tally.wrong or tally.failed or tally.bad_checks or left else 0


def left_of(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that are there after a minute: where the command had to be killed, another process clears away."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    left = processes
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = [each for each in left if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    return left


def report(tally: Tally, state: dict[str, Any], left: list[psutil.Process]) -> None:
    """Print what was seen."""
    print(f"answers {tally.answers.total()}: {dict(tally.answers)}; faults {dict(tally.faults)}")
    print(f"engines, each five seconds: {dict(sorted(tally.sizes.items()))}")
    largest = max((each["largest"] for each in tally.ties), default=0.0)
    print(f"parted from the single engine's by rounding: {len(tally.ties)}, by {largest:.1e} at most")
    print(f"wrong {len(tally.wrong)}; failed {len(tally.failed)} {tally.failed[:5]}")
    print(f"resumed {state['resumed_requests']} behind {state['resumed_tokens']} tokens, lost {state['lost_attempts']}")
    gaps = sorted(tally.gaps)
    if gaps:
        print(f"longest gap of a stream: p50 {gaps[len(gaps) // 2]:.2f} s, worst {gaps[-1]:.2f} s, {len(gaps)} streams")
    claims = {name: sum(each[name] for each in state["claims"].values()) for name in ("requests", "exact", "claimed")}
    claims |= {name: sum(each[name] for each in state["claims"].values()) for name in ("true", "over", "under")}
    print(f"claims {claims}; checks {tally.checks}, {tally.compared} comparisons, bad {tally.bad_checks[:3]}")
    print(f"left behind: {left}")


if __name__ == "__main__":
    sys.exit(main())
