"""The result of a run on the simulated engine, and the table of several."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np

from blockyard.cli import as_text

from ..printing import percent, short_number
from ..replay.timed import ServiceModel
from .simulated_engine import Counters, Request, SimulatedEngine
from .turns import SessionLoad

if TYPE_CHECKING:
    from .loop import LoopOptions

Percentiles = dict[str, float]


@dataclass(frozen=True, slots=True)
class GroupResult:
    """Turns of the sessions of one load.

    Attributes:
        load: name of the load.
        num_sessions: sessions at once; 0 for a run at the trace's own arrivals.
        turns_per_hour: finished turns per measured hour.
        latency: seconds from arrival to the end of the answer: p50, p95, p99 and max.
        waiting: seconds from arrival to first admission, likewise.
        num_unserved: turns that still wait at the end, never admitted. They count with their age, as do running ones.
    """

    load: str
    num_sessions: int
    turns_per_hour: float
    latency: Percentiles
    waiting: Percentiles
    num_unserved: int


@dataclass(frozen=True, slots=True)
class LoopResult:
    """The result of one run.

    Attributes:
        admission: order of admission.
        num_blocks: blocks of the pool.
        block_size: tokens per block.
        device: step times.
        hours: measured hours.
        warm_up: hours before them.
        seed: seed of the run.
        pools: mean prompt times sessions at once, divided by the pool; 0 for a run at the trace's own arrivals.
        all: all sessions together.
        groups: each load's sessions, if there are several loads.
        num_prompt_tokens: tokens of all prompts, at their first admission.
        num_computed_tokens: prompt tokens computed.
        num_skipped: turns skipped since they exceed 60 % of the pool, with the warm-up.
        jain: Jain's index over sessions at once, of what each got: pauses, and its turns' time on an idle device with
            an unlimited cache. 1 if all got the same, 1 / sessions if one got everything.
        counters: counts of the whole run, with the warm-up.
        bound_known: bound on turns per hour for schedules that know every pause.
        bound_aged: the same for rules that know only how long a context has been idle.
    """

    admission: str
    num_blocks: int
    block_size: int
    device: ServiceModel
    hours: float
    warm_up: float
    seed: int
    pools: float
    all: GroupResult
    groups: list[GroupResult]
    num_prompt_tokens: int
    num_computed_tokens: int
    num_skipped: int
    jain: float
    counters: Counters
    bound_known: float
    bound_aged: float

    @property
    def hit_rate(self) -> float:
        """Fraction of the prompt tokens that was not computed; below 0 if preemptions computed more again."""
        return 1 - self.num_computed_tokens / max(self.num_prompt_tokens, 1)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON."""
        return {**dataclasses.asdict(self), "hit_rate": self.hit_rate}


@dataclass(slots=True)
class Served:
    """Turns that finished or were left in the measured time, by group of sessions."""

    num_sessions: Sequence[int]
    latency: list[tuple[int, float]] = field(default_factory=list)
    waiting: list[tuple[int, float]] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    unserved: list[int] = field(default_factory=list)
    #: The engine's counters when the measured time began.
    before: Counters = field(default_factory=Counters)
    #: Seconds that each of the sessions at once got.
    got: dict[int, float] = field(default_factory=dict)

    def finish(self, request: Request, group: int, now: float, start: float, alone: float) -> None:
        """Count a turn that ended; its times only if it arrived in the measured time, which begins at `start`."""
        assert request.admitted is not None
        self.finished.append(group)
        self.got[request.slot] = self.got.get(request.slot, 0.0) + alone
        if request.arrived >= start:
            self.latency.append((group, now - request.arrived))
            self.waiting.append((group, request.admitted - request.arrived))

    def leave(self, engine: SimulatedEngine, groups: Sequence[int], start: float) -> None:
        """Count the turns that have not ended, with their age."""
        for request in [*engine.waiting.values(), *engine.running]:
            group, age = groups[request.slot], engine.now - request.arrived
            if request.arrived >= start or request.admitted is None:
                self.latency.append((group, age))
                admitted = engine.now if request.admitted is None else request.admitted
                self.waiting.append((group, admitted - request.arrived))
            if request.admitted is None:
                self.unserved.append(group)

    def result(self, name: str, group: int | None, hours: float) -> GroupResult:
        """Return the result of a group, or of all (None)."""

        def times(rows: list[tuple[int, float]]) -> Percentiles:
            seconds = [value for number, value in rows if group in (None, number)]
            found = np.percentile(seconds, [50, 95, 99, 100]).tolist() if seconds else [0.0] * 4
            return dict(zip(("p50", "p95", "p99", "max"), found, strict=True))

        finished = len(self.finished) if group is None else self.finished.count(group)
        unserved = len(self.unserved) if group is None else self.unserved.count(group)
        sessions = sum(self.num_sessions) if group is None else self.num_sessions[group]
        return GroupResult(name, sessions, finished / hours, times(self.latency), times(self.waiting), unserved)


def summarise(
    options: LoopOptions,
    loads: Sequence[tuple[SessionLoad, int]],
    served: Served,
    engine: SimulatedEngine,
    num_skipped: int,
    bounds: tuple[float, float],
) -> LoopResult:
    counters, then = engine.counters, served.before
    is_closed = any(count for _, count in loads)
    hours = max(engine.now / 3600 - (options.warm_up if is_closed else 0.0), 1e-9)
    names = [load.name for load, _ in loads]
    got = [served.got.get(slot, 0.0) for slot in range(sum(served.num_sessions))]
    size = (options.num_blocks - 1) * engine.block_size
    groups = [served.result(name, group, hours) for group, name in enumerate(names)]
    return LoopResult(
        admission=options.admission,
        num_blocks=options.num_blocks,
        block_size=engine.block_size,
        device=options.device,
        hours=hours,
        warm_up=options.warm_up if is_closed else 0.0,
        seed=options.seed,
        pools=sum(count * _mean_prompt(load, 0.6 * size) for load, count in loads) / size,
        all=served.result(" + ".join(names), None, hours),
        groups=groups if len(groups) > 1 else [],
        num_prompt_tokens=counters.num_prompt_tokens - then.num_prompt_tokens,
        num_computed_tokens=counters.num_computed_tokens - then.num_computed_tokens,
        num_skipped=num_skipped,
        jain=sum(got) ** 2 / (len(got) * sum(value * value for value in got) or 1.0),
        counters=counters,
        bound_known=bounds[0],
        bound_aged=bounds[1],
    )


def _mean_prompt(load: SessionLoad, most_tokens: float) -> float:
    sizes = [turn.num_prompt for session in load.sessions for turn in session if turn.num_tokens <= most_tokens]
    return mean(sizes) if sizes else 0.0


def loops_as_text(results: Sequence[LoopResult]) -> str:
    """Return the assumptions, and a table with a row for each pool, number of sessions and order of admission.

    Numbers are means over the seeds; `max` is the longest of all. The last columns compare with the first order.
    """
    first = results[0]
    constants = ", ".join(
        f"{name.removeprefix('seconds_')} {value:g}"
        for name, value in dataclasses.asdict(first.device).items()
        if name.startswith("seconds_")
    )
    seeds = sorted({result.seed for result in results})
    length = f"{first.warm_up:g} h to warm up, then {first.hours:.3g} h measured"
    about = (
        f"Simulated; seconds {constants}; at most {first.device.max_num_batched_tokens:,} tokens a step\n"
        f"{length}; seeds {', '.join(map(str, seeds))}; turns above 60 % of the pool are skipped; turns that wait or "
        f"run at the end count with their age"
    )
    cells: dict[tuple[int, int, str], list[LoopResult]] = {}
    for result in results:
        cells.setdefault((result.num_blocks, result.all.num_sessions, result.admission), []).append(result)
    rows = []
    for (num_blocks, num_sessions, _), runs in cells.items():
        base = next(found for key, found in cells.items() if key[:2] == (num_blocks, num_sessions))
        rows.append(_row(runs, base))
    notes = [_group_lines(runs) for runs in cells.values() if runs[0].groups]
    return "\n\n".join([about, as_text(rows), *(["\n".join(notes)] if notes else [])])


def _row(runs: Sequence[LoopResult], base: Sequence[LoopResult]) -> dict[str, str]:
    first, turns = runs[0], mean(run.all.turns_per_hour for run in runs)
    known, aged = mean(run.bound_known for run in runs), mean(run.bound_aged for run in runs)
    by_seed = {run.seed: run.all.turns_per_hour for run in base}
    times = [run.all.turns_per_hour / by_seed[run.seed] for run in runs if by_seed.get(run.seed)]
    beyond, admitted = (
        sum(getattr(run.counters, name) for run in runs) for name in ("num_beyond_lane", "num_admissions")
    )
    return {
        "sessions": f"{first.all.num_sessions or '-'}",
        "pools": f"{first.pools:.1f}" if first.pools else "-",
        "blocks": f"{first.num_blocks:,}",
        "admission": first.admission,
        "turns/h": f"{turns:,.0f}",
        "times": f"{min(times):.2f}-{max(times):.2f}" if times else "-",
        "hit": percent(mean(run.hit_rate for run in runs)),
        "computed": short_number(mean(run.num_computed_tokens for run in runs)),
        "latency 50/95/99/max s": _slashes([run.all.latency for run in runs]),
        "wait 50/95/99/max s": _slashes([run.all.waiting for run in runs]),
        "unserved": f"{sum(run.all.num_unserved for run in runs):,}",
        "Jain": f"{mean(run.jain for run in runs):.2f}" if first.all.num_sessions else "-",
        "beyond lane": "-" if first.admission == "arrival" else f"{beyond:,} of {admitted:,}",
        "bound known/aged": f"{known:,.0f}/{aged:,.0f}",
    }


def _slashes(times: Sequence[Percentiles]) -> str:
    cells = [f"{mean(row[name] for row in times):,.0f}" for name in ("p50", "p95", "p99")]
    return "/".join([*cells, f"{max(row['max'] for row in times):,.0f}"])


def _group_lines(runs: Sequence[LoopResult]) -> str:
    lines = [f"{runs[0].admission}:"]
    for parts in zip(*(run.groups for run in runs), strict=True):
        turns = mean(part.turns_per_hour for part in parts)
        lines.append(
            f"  {parts[0].num_sessions} of {parts[0].load}: {turns:,.0f} turns/h, latency "
            f"{_slashes([part.latency for part in parts])} s, wait {_slashes([part.waiting for part in parts])} s"
        )
    return "\n".join(lines)
