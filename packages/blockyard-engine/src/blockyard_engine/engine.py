"""The engine: requests in, tokens out, over one model and one cache."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from blockyard import StepPlan
from blockyard.answers import HintOutcome
from blockyard.arguments import require_int, require_session
from blockyard.errors import InvalidArgument, InvariantError
from blockyard.keys import ExtraKey
from blockyard.progress import WorkBar
from blockyard.steps import SwapPlan

from .assembly import assemble, require_bindable_events
from .beams.batch import BeamBatch
from .beams.search import BeamOptions, BeamSearch
from .decoding.sampler import Asked, Choice, StepSampler
from .decoding.speculation import PromptLookup
from .intake import Intake
from .model import load_model
from .options import EngineOptions
from .prompts import Prompt, encode_prompt
from .ranks.leader import ended_on_error, ranks_of
from .ranks.peers import Peers, StartedPeers
from .request import Branch, Request
from .results import Completion, GenerationResult, NewToken, StepReport
from .runner import ForwardBatch, ModelRunner, StepRunner
from .sampling import SamplingParams
from .scheduling.limits import CacheLimits
from .scheduling.scheduler import Scheduler
from .scheduling.step import ScheduledStep, StepRow
from .tiering import offload_of

if TYPE_CHECKING:
    from blockyard_tiers import Tier, TierUse

_Taken = TypeVar("_Taken")

_MAX_PRIORITY = 2**20
#: Seconds between two looks at tiers where there is nothing else to do.
_LOADING_PAUSE_SECONDS = 0.001
#: For what is being stored when the engine is closed.
_STORING_SECONDS = 5.0


class Engine:
    """Continuous batching of a causal language model of Hugging Face transformers over Blockyard's blocks.

    model: any model whose attention goes through transformers' attention interface and is causal attention, over all
        tokens or a sliding window, in every layer (docs/engine.md lists them). A new engine tries it first. It is
        borrowed: its attention is switched during a step and put back afterwards.
    tokenizer: the model's; None if all prompts are token ids.
    num_blocks, block_size: the pool. If num_blocks is None, the engine finds out how many blocks fit: on CUDA it runs
        the largest step and takes what `gpu_memory_utilization` leaves; on a CPU it takes 1 GiB of keys and values, or
        what a sequence of max_model_len tokens needs, within half of the machine's available memory.
    kv_cache_memory_bytes: the same pool by its size in bytes, on each rank; give one of the two. No step is run then.
    gpu_memory_utilization: share of a CUDA device's memory that may be in use in all, by other processes too.
    max_num_seqs: sequences that run at once. max_num_batched_tokens: tokens computed in one step, at least
        max_num_seqs; a longer prompt is computed in chunks.
    max_model_len: tokens of the longest sequence; the model's own limit if None.
    enable_prefix_caching: whether prompts take the blocks of earlier ones with the same beginning.
    num_cpu_blocks: blocks of a pool in CPU memory, which keeps what the pool evicts; 0 for none.
    swap_space_bytes: the same pool by its size in bytes; give one of the two.
    cache_options: further fields of the cache's config (`CACHE_OPTIONS`): eviction_policy, track_misses, ... `tenants`
        may be a function that makes them of the blocks to give out, called when the pool has its size.
    kv_events: where the cache's KV events are published (docs/events.md): an endpoint such as "tcp://127.0.0.1:5557",
        or a dict of `KVEventPublisher`'s arguments; None for nowhere. `close` ends the publisher.
    clock: seconds, told to the cache in every step: for residency, the history and the expiry of `retain`.
    preemption: where a sequence goes that makes room: "recompute" or "swap" (needs num_cpu_blocks).
    speculation: `PromptLookup` to try several tokens a step; the tokens are the same with and without.
    attention_backend: "auto" for the first that is installed and can serve the tensors, or the name of one
        (`attention.backends`): flash_attention_3, sdpa.
    tensor_parallel: ranks that share the model's heads and features, this process among them; the others are started,
        and end with `close`, with this object or with this process. The blocks are the same on all of them.
    context_parallel: ranks that share the tokens of every sequence instead, each with the whole model: token i is on
        rank (i // context_interleave) % context_parallel. block_size is a rank's part of a block; the cache's blocks
        hold as many times more tokens as there are ranks.

    tiers: of `blockyard_tiers`, below the pool, nearest first (docs/tiers.md): what is computed is stored there, and
        prompts that begin with it load it, also after a restart. `close` closes them. They need the extra `tiers`, and
        all ranks on one machine. tier_buffer_bytes: host memory for objects on their way to and from them.

    `cache` is the manager, `kv_cache` the tensors and `memory` the sum of bytes, to look at. Keys and values have the
    model's dtype and device. Not safe for use by several threads at once.

    Raises `InvalidArgument` for sizes outside their limits or too large for the device, `ModelError` for a model that
    the engine cannot serve, `RankError` for ranks that disagree or end.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        num_blocks: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        block_size: int = 16,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        max_model_len: int | None = None,
        enable_prefix_caching: bool = True,
        gpu_memory_utilization: float = 0.9,
        num_cpu_blocks: int = 0,
        swap_space_bytes: int = 0,
        preemption: str = "recompute",
        speculation: PromptLookup | None = None,
        attention_backend: str = "auto",
        cache_options: Mapping[str, Any] | None = None,
        kv_events: str | Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        tensor_parallel: int | Peers = 1,
        context_parallel: int | Peers = 1,
        context_interleave: int = 1,
        tiers: Iterable[Tier | TierUse] = (),
        tier_buffer_bytes: int = 2**31,
    ) -> None:
        options = EngineOptions(
            num_blocks=num_blocks,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            enable_prefix_caching=enable_prefix_caching,
            gpu_memory_utilization=gpu_memory_utilization,
            num_cpu_blocks=num_cpu_blocks,
            swap_space_bytes=swap_space_bytes,
            preemption=preemption,
            speculation=speculation,
            attention_backend=attention_backend,
            cache_options=cache_options,
            kv_events=kv_events,
        )
        given = list(tiers)
        self._ranks = ranks_of(tensor_parallel, context_parallel, context_interleave, model, block_size, max_model_len)
        with ended_on_error(self._ranks):
            if given:
                self._ranks.require_one_machine("tiers")
            parts = assemble(model, options, self._ranks)
        weakref.finalize(self, self._ranks.close)
        self.tokenizer = tokenizer
        self.shape, self.memory = parts.shape, parts.memory
        self.cache, self.kv_cache, self.kv_events = parts.cache, parts.kv_cache, parts.kv_events
        self._borrowed, self._runner = parts.borrowed, parts.runner
        #: Ranks that carry out its steps.
        self.num_ranks = self._ranks.size
        #: The states of a hybrid model; None without any, and where several ranks carry out steps.
        self.state_slots = parts.runner.slots if isinstance(parts.runner, ModelRunner) else None
        self._scheduler = Scheduler(self.cache, max_num_batched_tokens, parts.preemption)
        #: What binds the engine to its tiers; None without any.
        carry_out = partial(_carry_out, parts.runner, self._scheduler)
        with ended_on_error(self._ranks):
            self.offload = offload_of(
                given, tier_buffer_bytes, parts, self._ranks, max_num_batched_tokens, carry_out, clock
            )
        self._scheduler.use(self.offload)
        self._intake = Intake(self.shape, tokenizer, self._scheduler.limits, speculation)
        self._clock = clock
        #: Ids of the requests that computed something in the last step, also if it raised.
        self.last_step_ids: tuple[int, ...] = ()
        #: Tokens that speculation proposed, and those that the model confirmed, since the engine was made.
        self.num_drafted_tokens = 0
        #: Steps of a sequence in which it proposed any.
        self.num_drafts = 0
        self.num_accepted_tokens = 0

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any
    ) -> Engine:
        """Return an engine for the model in a folder (safetensors) or a .gguf file, which is converted once.

        options: as for `Engine`. Nothing is downloaded. Raises `ModelError`, in one sentence, if there is no such
        model or it cannot be read, and `PublisherError` before it is loaded for `kv_events` whose port is in use.
        """
        require_bindable_events(options.get("kv_events"))
        model, tokenizer = load_model(path, dtype, device)
        for name in ("tensor_parallel", "context_parallel"):
            if type(options.get(name)) is int:
                options[name] = StartedPeers(options[name], path)
        return cls(model, tokenizer, **options)

    # Prompts to their ends.

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        extra_keys: Sequence[ExtraKey] = (),
        tenant: str | None = None,
        progress: bool = False,
        on_step: Callable[[StepReport], None] | None = None,
    ) -> list[GenerationResult]:
        """Run prompts to their ends and return their results, in the order of the prompts.

        prompts: each a string, a list of chat messages ({"role": ..., "content": ...}), or a list of token ids.
        sampling: one for all, or one for each; greedy and 128 tokens if None. extra_keys, tenant: of all of them, as
        for `add_request`. progress: draw a bar on stderr, if that is a terminal. on_step: called after each step; it
        may abort requests.

        Raises `NeverFits` or `InvalidArgument` for a prompt that cannot be served, before any is run. If anything
        else raises, on_step too, every sequence is freed and the cache stays whole.
        """
        self._require_idle("generate")
        requests = self._intake.requests(prompts, sampling, extra_keys, tenant)
        for request in requests:
            self._scheduler.add(request)
        try:
            with self._borrowed, WorkBar("generating", len(requests), progress) as bar:
                num_tokens = num_finished = 0
                while self.has_unfinished:
                    report = self.step()
                    num_tokens += len(report.new_tokens)
                    num_finished += len(report.finished)
                    self.pause_for_tiers(report)
                    state = f"{report.num_running} running, {report.num_waiting} waiting, {num_tokens} tokens"
                    bar.update(num_finished, state)
                    if on_step is not None:
                        on_step(report)
        except BaseException:
            self.abort_all()
            raise
        return [request.result() for request in requests]

    def beam_search(
        self,
        prompt: Prompt,
        num_beams: int,
        max_tokens: int,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
    ) -> list[Completion]:
        """The likeliest continuations of a prompt, best first: `num_beams` of them; see `BeamOptions` for the rest.

        Raises `NeverFits` if an empty cache could not hold the beams, `InvalidArgument` for values outside their
        limits or while requests are unfinished.
        """
        options = BeamOptions(num_beams, max_tokens, length_penalty, early_stopping)
        return self._search_beams({"prompt": prompt}, options)[0]

    def beam_search_batch(
        self,
        prompts: Sequence[Prompt],
        num_beams: int,
        max_tokens: int,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
    ) -> list[list[Completion]]:
        """A `beam_search` for each prompt, as many side by side as the cache is sure to hold; raises likewise."""
        options = BeamOptions(num_beams, max_tokens, length_penalty, early_stopping)
        return self._search_beams({f"prompt {number}": prompt for number, prompt in enumerate(prompts)}, options)

    def _search_beams(self, prompts: dict[str, Prompt], options: BeamOptions) -> list[list[Completion]]:
        """Search the beams of all prompts, with nothing else in the batch."""
        self._require_idle("beam_search")
        options.check(self.cache.config)
        scheduler = self._scheduler
        budget = scheduler.max_num_batched_tokens
        batch = BeamBatch(self.cache, self._runner, scheduler.moves, scheduler.limits, budget)
        searches = []
        for name, prompt in prompts.items():
            token_ids = encode_prompt(name, prompt, self.tokenizer, self.shape.vocab_size)
            searches.append(BeamSearch(token_ids, options, self.shape.eos_token_ids))
            batch.require_fits(name, searches[-1])
        try:
            self.cache.advance_time(self._clock())
            batch.run(searches)
        except BaseException:
            self._recover(keep=False)
            raise
        finally:
            self.cache.pool.publish_events()
        return [search.completions(self.tokenizer) for search in searches]

    # Requests, step by step.

    def add_request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        priority: int = 0,
        extra_keys: Sequence[ExtraKey] = (),
        session: str | None = None,
        given: Sequence[int] = (),
        tenant: str | None = None,
    ) -> int:
        """Queue one prompt for `step`; returns its request id. Raises as `generate` does.

        priority: lower goes first; a level is worth 256 steps of waiting (`scheduling.scheduler`). extra_keys: a
        `CacheSalt`, say: it shares blocks only with requests that have the same ones (`blockyard.keys`). session: a
        name for the conversation that this is a turn of, 1 to 200 characters, for `hint`; None for none. given: the
        first tokens of the answer, chosen elsewhere, perhaps by an engine that died: it goes on behind them as if it
        had chosen them itself. Positions, penalties, draws from the seed, `min_tokens` and `stop` count them; steps
        report what follows them, the result has all. In float32 the answer is that of an undisturbed run. They are for
        one completion without logprobs, at most max_tokens - 1, and none of them may end the answer. tenant: the name
        of whose it is, where `cache_options` has `tenants`; None for what extra_keys say. A salt stands behind the
        tenant's own then (`tenants.Roster.keys_of`).
        """
        require_int("priority", priority, -_MAX_PRIORITY, _MAX_PRIORITY)
        wanted = SamplingParams() if sampling is None else sampling
        request = self._intake.request("prompt", prompt, wanted, priority, extra_keys, session, tenant)
        self._intake.go_on(request, given)
        self._scheduler.add(request)
        return request.request_id

    def hint(self, session: str, *, over: bool = False) -> HintOutcome:
        """Say that a session is over, or take that back (`KVCacheManager.hint`).

        What is said holds for the session's newest state and until its next turn is admitted, whatever became of the
        one before: of `n` completions, of a request that was preempted or aborted. It changes what is evicted first,
        and no token. A session is known from the step that admits its first request; until then the answer is
        `HintOutcome.UNKNOWN`.

        Cost as of `KVCacheManager.hint`. Raises `InvalidArgument` for a name that cannot be.
        """
        name = require_session("session", session)
        return self.cache.hint(name, over=over)

    def retain(
        self,
        token_ids: Sequence[int],
        *,
        priority: int = 1,
        seconds: float | None = None,
        extra_keys: Sequence[ExtraKey] = (),
    ) -> int:
        """Ask that the cached blocks `token_ids` begins with be evicted last, for `seconds` by the engine's clock.

        Returns how many blocks it concerns. `KVCacheManager.retain` says the rest, and raises; `num_retained_of` says
        how many of a prompt's blocks a wish still keeps.
        """
        now = self._clock()
        self.cache.advance_time(now)
        return self.cache.retain(
            token_ids,
            priority=priority,
            expires_at=None if seconds is None else now + seconds,
            extra_keys=tuple(extra_keys),
        )

    def num_retained_of(self, token_ids: Sequence[int], *, extra_keys: Sequence[ExtraKey] = ()) -> int:
        """Count the cached blocks `token_ids` begins with that `retain` keeps now, by the engine's clock."""
        self.cache.advance_time(self._clock())
        return self.cache.num_retained_of(token_ids, extra_keys=tuple(extra_keys))

    def max_new_tokens(self, num_prompt_tokens: int, n: int = 1) -> int:
        """Return the largest max_tokens that `add_request` takes for such a prompt; 0 if none."""
        return self.limits.max_new_tokens(num_prompt_tokens, n)

    @property
    def limits(self) -> CacheLimits:
        """Says which sizes of requests an empty cache can carry to their end."""
        return self._scheduler.limits

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence that it can carry to its end: the model's limit, or what the pool can hold."""
        return self.limits.max_model_len

    def abort_request(self, request_id: int) -> GenerationResult:
        """Drop a request, wherever it is, and free all its blocks; returns what came of it so far.

        Raises `InvalidArgument` if there is none of this id.
        """
        request = self._scheduler.abort(request_id)
        if request is None:
            raise InvalidArgument(f"request_id is {request_id}; no such request waits or runs")
        self.cache.pool.publish_events()
        return request.result()

    def abort_all(self) -> None:
        """Drop every request."""
        self._scheduler.abort_all()
        self.cache.pool.publish_events()

    def preempt_all(self) -> None:
        """Free the blocks of all that runs or is swapped out and queue it again with its tokens.

        It will find much of it cached.
        """
        self._scheduler.forget_swapped()
        self._scheduler.preempt_running()
        self.cache.pool.publish_events()

    def forget_computed(self) -> None:
        """Forget every key, value and state, so that all tokens are computed again: the model has new weights.

        Call it after the weights were replaced in place, before the next step. Requests keep the tokens that they
        have; hand-overs on their way are refused (docs/engine.md, "New weights"). Raises `InvalidArgument` for an
        engine of several ranks: the models of the others keep the old weights. O(blocks).
        """
        if self.num_ranks > 1:
            raise InvalidArgument(
                f"forget_computed: the engine has {self.num_ranks} ranks, and new weights reach this process's model "
                "only; make a new engine"
            )
        self.preempt_all()
        self.cache.reset_prefix_cache()

    @property
    def attention_backend(self) -> str:
        """Return the name of the attention backend in use."""
        return self._runner.attention_backend

    @property
    def has_unfinished(self) -> bool:
        """Return whether requests wait or run."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    @property
    def num_running(self) -> int:
        """Count the requests of which something runs."""
        return len(self._scheduler.running_ids())

    @property
    def num_waiting(self) -> int:
        """Count the requests of which nothing runs."""
        return len(self._scheduler.requests()) - self.num_running

    @property
    def num_deferred(self) -> int:
        """Count the waiting requests that waited, at the last step, for another to compute their beginning."""
        return len(self._scheduler.deferred_ids())

    @property
    def num_loading(self) -> int:
        """Return how many waiting requests waited, at the last step, for a tier."""
        return self._scheduler.num_loading

    def pause_for_tiers(self, report: StepReport) -> None:
        """Wait a millisecond where the last step computed nothing because all requests wait for tiers."""
        if self.num_loading and report.num_tokens == 0:
            time.sleep(_LOADING_PAUSE_SECONDS)

    @property
    def num_preemptions(self) -> int:
        """Return how often a sequence was preempted to make room, since the engine was made."""
        return self._scheduler.num_preemptions

    @property
    def num_cpu_hit_tokens(self) -> int:
        """Count the prompt tokens, of those that the cache had, whose keys and values lay in the CPU pool."""
        return self._scheduler.cpu_hits.num_tokens

    @property
    def loading_blocks(self) -> npt.NDArray[np.int32]:
        """Return blocks of the pool that the latest step fills from the CPU pool, or the next one, int32 (n,). O(n)."""
        return self._scheduler.moves.loading()

    def step(self, *, only: Collection[int] | None = None, keep_on_error: bool = False) -> StepReport:
        """Run one step: schedule, compute, choose tokens, and end what is finished.

        only: ids of the requests that take part; the others sit still. If it raises, every request is dropped and its
        blocks are freed; with keep_on_error they are queued again instead, with the tokens that they
        had before the step. Either way nothing that was not computed can be hit.
        """
        self._ranks.require_all()
        try:
            began = self._clock()
            self.cache.advance_time(began)
            step = self._scheduler.schedule(only)
            self.last_step_ids = tuple(dict.fromkeys(row.branch.request.request_id for row in step.rows))
            is_idle = not step.rows and not step.preempted and not self.num_loading
            if only is None and self.has_unfinished and is_idle:
                raise InvariantError("no unfinished request can be scheduled; this is a bug, please report it")
            chosen = self._compute(step)
            if self.offload is not None:
                self.offload.note_computed(step.num_known, self._clock() - began)
            return self._conclude(step, chosen)
        except BaseException:
            self._recover(keep_on_error)
            raise
        finally:
            if self.kv_events is not None:
                self.kv_events.publish()

    # For prompts that are computed in one engine and decoded in another (`handoff`).

    @property
    def request_ids(self) -> frozenset[int]:
        """Return all waiting and running requests. O(requests)."""
        return frozenset(self._scheduler.requests())

    def prepare(self, name: str, prompt: Prompt, sampling: SamplingParams, extra_keys: Sequence[ExtraKey]) -> Request:
        """Return a request that is checked and not queued, for `adopt`. name: what errors call the prompt.

        Raises as `add_request`.
        """
        return self._intake.request(name, prompt, sampling, extra_keys=extra_keys)

    def adopt(self, request: Request, seq: int) -> None:
        """Run a prepared request whose prompt was computed elsewhere and whose first token is chosen.

        seq: its sequence, which is the engine's from now on.
        """
        self._scheduler.adopt(request, seq)

    def take_out(self, request_id: int, take: Callable[[int], _Taken]) -> _Taken:
        """Give the sequence of a running request to `take`, and forget the request; returns what `take` does.

        If `take` raises, the sequence is freed.
        """
        branch = self._scheduler.requests()[request_id].branches[0]
        try:
            taken = take(branch.seq)
            branch.seq = -1
        finally:
            self.abort_request(request_id)
        return taken

    def move_blocks(self, plan: SwapPlan) -> None:
        """Carry out at once what a plan moves that was made outside of a step."""
        self._scheduler.moves.note(plan)
        self._scheduler.moves.carry_out(self.kv_cache, self.state_slots)

    def close(self) -> None:
        """End the other ranks, the publisher of KV events and the tiers, if there are any. A second call does nothing.

        What is being stored may take 5 seconds to end.
        """
        if self.offload is not None:
            self.offload.close(0.0 if self.lost else _STORING_SECONDS)
        self._ranks.close()
        if self.kv_events is not None:
            self.kv_events.close()

    @property
    def lost(self) -> str | None:
        """Return why no more steps can be made, as when a rank has ended; None while they can."""
        return self._ranks.lost

    def silence(self) -> str | None:
        """Why no step can be made now, asked of every rank; None while all answer. For any thread; it may wait seconds.

        A rank that was killed is not `lost` until the system has taken its memory back, and one that was stopped is not
        until a step has waited for it; neither answers.
        """
        return self._ranks.silence()

    def on_lost(self, call: Callable[[str], None]) -> None:
        """Have `call` told why, in a thread of its own, when a rank has ended; at once if it has."""
        self._ranks.tell(call)

    def _recover(self, keep: bool) -> None:
        """A step or a search broke: leave a whole cache, and blocks that hold what they are said to hold."""
        try:
            self._runner.carry_out(self._scheduler.moves)
        except Exception:  # the device is failing: nothing that should have been moved may be found
            self._scheduler.moves.clear()
            self._scheduler.forget_swapped()
            self.cache.reset_prefix_cache()
        if keep:
            self._scheduler.preempt_running()
        else:
            self._scheduler.abort_all()

    def _compute(self, step: ScheduledStep) -> list[list[Choice]]:
        """Return what follows each row: nothing, tokens one after another, or a first token for each completion."""
        if step.plan is None:
            self._runner.carry_out(self._scheduler.moves)
            return []
        num_logits = [row.num_logits for row in step.rows]
        drafts = [token for row in step.rows for token in row.draft]
        batch = ForwardBatch.of(step.plan, self.cache.config.layer_groups, num_logits, drafts)
        logits = self._runner.run(batch, self._scheduler.moves)
        chooser = StepSampler(logits)
        chosen, place = [], 0
        for row in step.rows:
            chosen.append(_choices(chooser, row, place) if row.samples else [])
            place += row.num_logits
        return chosen

    def _conclude(self, step: ScheduledStep, chosen: list[list[Choice]]) -> StepReport:
        """Tell the cache what was computed, and hand the tokens out. If a tokenizer raises, no branch has any."""
        marks = [(branch, branch.mark()) for row in step.rows for branch in _takers(row.branch)]
        try:
            return self._hand_out(step, chosen)
        except BaseException:
            for branch, mark in marks:
                branch.reset(mark)
            raise

    def _hand_out(self, step: ScheduledStep, chosen: list[list[Choice]]) -> StepReport:
        new_tokens: list[NewToken] = []
        known: list[list[int]] = []
        num_accepted = 0
        forks: list[tuple[Request, list[Choice]]] = []
        for row, choices in zip(step.rows, chosen, strict=True):
            if choices and _forks(row.branch):
                forks.append((row.branch.request, choices))
                known.append([])
                continue
            taken = _take(row.branch, choices)
            new_tokens += taken
            num_accepted += max(len(taken) - 1, 0)
            ids = [token.token_id for token in taken]
            known.append(ids if row.branch.finish_reason is None else ids[:-1])  # the last is never computed
        if step.rows:
            self._scheduler.commit(step, known)
        for request, choices in forks:
            self._scheduler.fork(request, [choice.token_id for choice in choices])
            for branch, choice in zip(request.branches, choices, strict=True):
                new_tokens += _take(branch, [choice])
        self.num_drafted_tokens += step.num_drafted
        self.num_drafts += sum(1 for row in step.rows if row.draft)
        self.num_accepted_tokens += num_accepted
        return self._report(step, new_tokens, self._retire(step), num_accepted)

    def _retire(self, step: ScheduledStep) -> list[GenerationResult]:
        """End what is finished; returns the results of requests of which that was the last."""
        requests = dict.fromkeys(row.branch.request for row in step.rows)
        ended = [branch for branch in self._scheduler.running if branch.finish_reason is not None]
        self._scheduler.retire(ended)
        return [request.result() for request in requests if request.is_finished]

    def _report(
        self, step: ScheduledStep, new_tokens: list[NewToken], finished: list[GenerationResult], num_accepted: int
    ) -> StepReport:
        return StepReport(
            num_tokens=int(step.num_scheduled.sum()),
            num_seqs=len(step.rows),
            num_preempted=len(step.preempted),
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            new_tokens=new_tokens,
            finished=finished,
            num_drafted=step.num_drafted,
            num_accepted=num_accepted,
        )

    def _require_idle(self, call: str) -> None:
        if self.has_unfinished:
            number = len(self._scheduler.requests())
            raise InvalidArgument(f"{call}: {number} requests of add_request are unfinished; step them first")


def _carry_out(runner: StepRunner, scheduler: Scheduler, plan: StepPlan) -> None:
    """Move at once all that a plan moves to make room for what tiers bring, behind what waits already."""
    scheduler.note_fill(plan)
    runner.carry_out(scheduler.moves)


def _forks(branch: Branch) -> bool:
    return len(branch.request.branches) > 1 and not branch.request.is_forked


def _takers(branch: Branch) -> list[Branch]:
    """Return those that take the tokens chosen for a branch: all of a request's behind its prompt."""
    return branch.request.branches if _forks(branch) else [branch]


def _choices(chooser: StepSampler, row: StepRow, place: int) -> list[Choice]:
    branch, request = row.branch, row.branch.request
    num_prompt, stops = len(request.prompt_token_ids), request.stop_token_ids
    asked = [Asked(request.sampling, other.index, num_prompt, stops) for other in _takers(branch)]
    if _forks(branch):
        return [chooser.choose(place, one, branch.token_ids) for one in asked]
    return chooser.verify(place, asked[0], branch.token_ids, row.draft)


def _take(branch: Branch, choices: list[Choice]) -> list[NewToken]:
    """Take tokens one after another until one ends the branch."""
    taken = []
    for choice in choices:
        if branch.finish_reason is None:
            taken.append(branch.take(choice))
    return taken
