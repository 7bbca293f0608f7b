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

from .beams.batch import BeamBatch
from .beams.search import BeamOptions, BeamSearch
from .components import build_components, require_bindable_events
from .decoding.sampler import Choice, SamplingContext, StepSampler
from .decoding.speculation import PromptLookup
from .engine_options import EngineOptions
from .input_processor import InputProcessor
from .model import load_model
from .prompt_encoding import Prompt, encode_prompt
from .ranks.leader import closing_on_error, start_ranks
from .ranks.peers import Peers, StartedPeers
from .request import Branch, Request
from .results import Completion, GenerationResult, NewToken, StepReport
from .runner import ForwardBatch, ModelRunner, StepRunner
from .sampling import SamplingParams
from .scheduling.admission_control import AdmissionControl
from .scheduling.limits import CacheLimits
from .scheduling.scheduler import Scheduler
from .scheduling.step import ScheduledStep, StepRow
from .tiering import make_offload

if TYPE_CHECKING:
    from blockyard_tiers import Tier, TierUse

_Taken = TypeVar("_Taken")

_MAX_PRIORITY = 2**20
#: Seconds between two polls of the tiers when there is nothing else to do.
_LOADING_PAUSE_SECONDS = 0.001
#: Longest sleep of `generate` while the order of admission holds all requests back.
_HOLDING_PAUSE_SECONDS = 0.05
#: Seconds that `close` waits for stores in progress.
_STORING_SECONDS = 5.0


class Engine:
    """Continuous batching of a causal language model of Hugging Face transformers over Blockyard's blocks.

    `cache` is the manager, `kv_cache` the tensors, `memory` the memory use in bytes, and `offload` the connection to
    the tiers (None without tiers). Keys and values have the model's dtype and device. An engine is not thread-safe.

    Args:
        model: a model whose layers all compute causal attention, over all tokens or a sliding window, through
            transformers' attention interface (docs/engine.md lists them). A new engine tests it first. Its attention is
            switched only during a step.
        tokenizer: the model's tokenizer; None if all prompts are token ids.
        num_blocks: number of blocks in the pool; None for as many as fit. On CUDA the engine runs its largest step and
            takes what `gpu_memory_utilization` leaves; on a CPU it takes 1 GiB of keys and values, or the memory of a
            sequence of max_model_len tokens if that is more, within half of the machine's available memory.
        kv_cache_memory_bytes: size of the pool in bytes on each rank, instead of `num_blocks`; no step is run then.
        block_size: tokens per block, on each rank.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens computed in one step, at least max_num_seqs; longer prompts are computed in
            chunks.
        max_model_len: tokens of the longest sequence; None for the model's own limit.
        enable_prefix_caching: whether prompts reuse the blocks of earlier ones with the same prefix.
        gpu_memory_utilization: share of a CUDA device's memory that may be in use in total, other processes included.
        num_cpu_blocks: blocks of a pool in CPU memory for evicted blocks; 0 for none.
        swap_space_bytes: size of the CPU pool in bytes, instead of `num_cpu_blocks`.
        preemption: "recompute", or "swap" to move a preempted sequence to the CPU pool (needs one).
        speculation: `PromptLookup` to try several tokens a step, or None; the generated tokens are the same.
        attention_backend: "auto" for the first installed backend that supports the tensors, or a name
            (`attention.backends`): flash_attention_3, sdpa.
        cache_options: further fields of the cache's config (`CACHE_OPTIONS`): eviction_policy, track_misses, ...
            `tenants` may be a function from the number of usable blocks to the tenants, called once the pool's size is
            known.
        kv_events: where to publish the cache's KV events (docs/events.md): an endpoint such as "tcp://127.0.0.1:5557",
            or a dict of `KVEventPublisher`'s arguments; None to publish none. `close` ends the publisher.
        clock: returns the time in seconds, passed to the cache in every step: for residency, the history and `retain`.
        tensor_parallel: ranks that share the model's heads and features, this process included. The engine starts the
            other processes; they end with `close`, with the engine or with this process. All ranks have the same
            blocks.
        context_parallel: ranks that share the tokens of every sequence, each with the whole model. Token i is on rank
            (i // context_interleave) % context_parallel, and a block of the cache holds block_size tokens on each rank.
        context_interleave: consecutive tokens that stay on one rank.
        tiers: tiers of `blockyard_tiers` below the pool, nearest first (docs/tiers.md). Computed blocks are stored
            there and loaded for later prompts with the same prefix, even after a restart. `close` closes them. They
            need the extra `tiers`, and all ranks on one machine.
        tier_buffer_bytes: host memory for objects on their way to and from tiers.
        admission: order of the waiting requests with priority 0: "arrival", "fewest" missing tokens first, or "room"
            for the contexts just used (docs/admission.md). The tokens are the same.
        admission_lane: with "fewest" and "room", the request that waits longest gets one part in this many of the time;
            at least 1.

    Raises:
        InvalidArgument: an argument is outside its limits or too large for the device.
        ModelError: the engine cannot serve this model.
        RankError: ranks disagree, or one has ended.
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
        admission: str = "arrival",
        admission_lane: float = 4.0,
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
            admission=admission,
            admission_lane=admission_lane,
        )
        given = list(tiers)
        self._ranks = start_ranks(
            tensor_parallel, context_parallel, context_interleave, model, block_size, max_model_len
        )
        with closing_on_error(self._ranks):
            if given:
                self._ranks.require_one_machine("tiers")
            components = build_components(model, options, self._ranks)
        weakref.finalize(self, self._ranks.close)
        self.tokenizer = tokenizer
        self.shape, self.memory = components.shape, components.memory
        self.cache, self.kv_cache, self.kv_events = components.cache, components.kv_cache, components.kv_events
        self._patched, self._runner = components.patched, components.runner
        #: Number of ranks that carry out each step.
        self.num_ranks = self._ranks.size
        #: State slots of a hybrid model; None without states, and with several ranks.
        self.state_slots = components.runner.slots if isinstance(components.runner, ModelRunner) else None
        #: The order of admission; None for arrival.
        self.admission = (
            None if admission == "arrival" else AdmissionControl(self.cache, admission, admission_lane, clock)
        )
        self._scheduler = Scheduler(self.cache, max_num_batched_tokens, components.preemption, self.admission)
        carry_out = partial(_carry_out, components.runner, self._scheduler)
        with closing_on_error(self._ranks):
            self.offload = make_offload(
                given, tier_buffer_bytes, components, self._ranks, max_num_batched_tokens, carry_out, clock
            )
        self._scheduler.set_offload(self.offload)
        self._input_processor = InputProcessor(self.shape, tokenizer, self._scheduler.limits, speculation)
        self._clock = clock
        #: Ids of the requests that computed something in the last step, also if it raised.
        self.last_step_ids: tuple[int, ...] = ()
        #: Tokens that speculation has proposed so far.
        self.num_drafted_tokens = 0
        #: Drafts proposed so far, one per sequence and step.
        self.num_drafts = 0
        #: Proposed tokens that the model has confirmed so far.
        self.num_accepted_tokens = 0

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any
    ) -> Engine:
        """Return an engine for the model in a folder (safetensors) or a .gguf file, which is converted once.

        Nothing is downloaded. Raises `ModelError` if there is no such model or it cannot be read, and, before anything
        is loaded, `PublisherError` if the port of `kv_events` is in use.

        Args:
            path: a folder with config.json and safetensors, or a .gguf file.
            dtype: dtype of the weights, keys and values.
            device: the torch device.
            options: arguments of `Engine`.
        """
        require_bindable_events(options.get("kv_events"))
        model, tokenizer = load_model(path, dtype, device)
        for name in ("tensor_parallel", "context_parallel"):
            if type(options.get(name)) is int:
                options[name] = StartedPeers(options[name], path)
        return cls(model, tokenizer, **options)

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
        """Run all prompts until they are finished and return their results in the order of the prompts.

        Raises `NeverFits` or `InvalidArgument` if one of the prompts cannot be served, before any is run. After any
        other error, also in `on_step`, all sequences are freed and the cache is consistent.

        Args:
            prompts: each a string, a list of chat messages ({"role": ..., "content": ...}), or a list of token ids.
            sampling: one for all prompts, or one for each; None for greedy with 128 tokens.
            extra_keys: extra keys of all prompts, as for `add_request`.
            tenant: tenant of all prompts, as for `add_request`.
            progress: whether to draw a progress bar, if stderr is a terminal.
            on_step: called after each step; it may abort requests.
        """
        self._require_idle("generate")
        requests = self._input_processor.requests(prompts, sampling, extra_keys, tenant)
        for request in requests:
            self._scheduler.add(request)
        try:
            with self._patched, WorkBar("generating", len(requests), progress) as bar:
                num_tokens = num_finished = 0
                while self.has_unfinished:
                    report = self.step()
                    num_tokens += len(report.new_tokens)
                    num_finished += len(report.finished)
                    self.pause_for_tiers(report)
                    if (pause := self.idle_seconds) > 0:
                        time.sleep(min(pause, _HOLDING_PAUSE_SECONDS))
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
        """Return the `num_beams` most likely continuations of a prompt, best first.

        `BeamOptions` documents the options. Raises `NeverFits` if an empty cache could not hold the beams, and
        `InvalidArgument` for values outside their limits or while requests are unfinished.
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
        """Run `beam_search` for each prompt, as many at once as the cache is sure to hold. Raises as `beam_search`."""
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
        answer_prefix: Sequence[int] = (),
        tenant: str | None = None,
    ) -> int:
        """Queue one prompt for `step` and return its request id. Raises as `generate` does.

        Args:
            prompt: a string, a list of chat messages, or a list of token ids.
            sampling: sampling parameters; None for greedy with 128 tokens.
            priority: lower is served first; one level equals 256 steps of waiting (`scheduling.scheduler`).
            extra_keys: keys such as `CacheSalt` (`blockyard.keys`); blocks are shared only between requests with equal
                keys.
            session: name of the conversation that this request continues, 1 to 200 characters, for `hint`; None for
                none.
            answer_prefix: first tokens of the answer, chosen elsewhere, such as by an engine that died. The request
                continues after them as if it had chosen them itself: positions, penalties, draws, `min_tokens` and
                `stop` count them. Steps report only later tokens; the result has all. In float32 the answer equals that
                of an undisturbed run. Only for one completion without logprobs; at most max_tokens - 1 tokens, none of
                which may end the answer.
            tenant: name of the request's tenant if `cache_options` has `tenants`; None for the tenant that extra_keys
                name. A salt follows the tenant's own then (`tenants.Roster.keys_of`).
        """
        require_int("priority", priority, -_MAX_PRIORITY, _MAX_PRIORITY)
        wanted = SamplingParams() if sampling is None else sampling
        request = self._input_processor.request("prompt", prompt, wanted, priority, extra_keys, session, tenant)
        self._input_processor.resume(request, answer_prefix)
        self._scheduler.add(request)
        return request.request_id

    def hint(self, session: str, *, over: bool = False) -> HintOutcome:
        """Signal that a session is over, or withdraw that (`KVCacheManager.hint`).

        The hint holds for the session's newest state until its next turn is admitted, also after a preemption or an
        abort. It changes the order of eviction, but no token. A session is known once its first request is admitted;
        before that the answer is `HintOutcome.UNKNOWN`.

        Raises `InvalidArgument` for an invalid name.
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
        """Ask the cache to evict the cached blocks of a prefix last, and return how many blocks that concerns.

        Args:
            token_ids: tokens whose longest cached prefix is retained.
            priority: as in `KVCacheManager.retain`, which also lists the errors.
            seconds: duration by the engine's clock; None for no limit.
            extra_keys: extra keys that the tokens were cached under.
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
        """Return how many cached blocks of a prefix are retained now, by the engine's clock."""
        self.cache.advance_time(self._clock())
        return self.cache.num_retained_of(token_ids, extra_keys=tuple(extra_keys))

    def max_new_tokens(self, num_prompt_tokens: int, n: int = 1) -> int:
        """Return the largest max_tokens that `add_request` accepts for a prompt of this length; 0 if none."""
        return self.limits.max_new_tokens(num_prompt_tokens, n)

    @property
    def limits(self) -> CacheLimits:
        """Sizes of requests that an empty cache can serve."""
        return self._scheduler.limits

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence that can be served: the model's limit, or the pool's if that is smaller."""
        return self.limits.max_model_len

    def abort_request(self, request_id: int) -> GenerationResult:
        """Drop a request, free all its blocks, and return its result so far.

        Raises `InvalidArgument` if no request with this id is waiting or running.
        """
        request = self._scheduler.abort(request_id)
        if request is None:
            raise InvalidArgument(f"request_id is {request_id}; no request with this id is waiting or running")
        self.cache.pool.publish_events()
        return request.result()

    def abort_all(self) -> None:
        """Drop every request and free its blocks."""
        self._scheduler.abort_all()
        self.cache.pool.publish_events()

    def preempt_all(self) -> None:
        """Free the blocks of all running and swapped-out requests and queue them again with their tokens.

        Most of their tokens usually hit the cache when they are admitted again.
        """
        self._scheduler.forget_swapped()
        self._scheduler.preempt_running()
        self.cache.pool.publish_events()

    def forget_computed(self) -> None:
        """Drop all keys, values and states, so that all tokens are computed again with new weights.

        Call it after the weights were replaced in place, before the next step. Requests keep their tokens; hand-overs
        in progress are refused (docs/engine.md, "New weights"). Raises `InvalidArgument` for an engine of several
        ranks, since the other ranks' models keep the old weights. O(blocks).
        """
        if self.num_ranks > 1:
            raise InvalidArgument(
                f"forget_computed: the engine has {self.num_ranks} ranks, and the weights were replaced only in this "
                "process; make a new engine"
            )
        self.preempt_all()
        self.cache.reset_prefix_cache()

    @property
    def attention_backend(self) -> str:
        """Name of the attention backend in use."""
        return self._runner.attention_backend

    @property
    def has_unfinished(self) -> bool:
        """True while any request is waiting or running."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    @property
    def num_running(self) -> int:
        """Number of requests with a running sequence."""
        return len(self._scheduler.running_ids())

    @property
    def num_waiting(self) -> int:
        """Number of requests without a running sequence."""
        return len(self._scheduler.requests()) - self.num_running

    @property
    def num_deferred(self) -> int:
        """Number of waiting requests that waited, at the last step, for another to compute their prefix."""
        return len(self._scheduler.deferred_ids())

    @property
    def num_loading(self) -> int:
        """Number of waiting requests that waited for a tier at the last step."""
        return self._scheduler.num_loading

    def pause_for_tiers(self, report: StepReport) -> None:
        """Sleep a millisecond if the last step computed nothing because all requests wait for tiers."""
        if self.num_loading and report.num_tokens == 0:
            time.sleep(_LOADING_PAUSE_SECONDS)

    @property
    def idle_seconds(self) -> float:
        """Seconds until a step can compute something, unless a request is added before; 0 if one may now.

        Above 0 only if nothing runs and the order of admission holds all waiting requests back. Sleep until then
        instead of calling `step`.
        """
        return self._scheduler.idle_seconds

    @property
    def num_preemptions(self) -> int:
        """Number of sequences preempted to make room so far."""
        return self._scheduler.num_preemptions

    @property
    def num_cpu_hit_tokens(self) -> int:
        """Number of cached prompt tokens that were loaded from the CPU pool."""
        return self._scheduler.cpu_hits.num_tokens

    @property
    def loading_blocks(self) -> npt.NDArray[np.int32]:
        """Pool blocks that the latest or next step fills from the CPU pool, int32 (n,). O(n)."""
        return self._scheduler.moves.loading()

    def step(self, *, only: Collection[int] | None = None, keep_on_error: bool = False) -> StepReport:
        """Run one step: schedule, compute, sample, and retire finished sequences.

        After an error, nothing that was not computed can be hit.

        Args:
            only: ids of the requests that may take part; None for all.
            keep_on_error: if the step raises, queue every request again with the tokens that it had before the step; by
                default every request is dropped and its blocks are freed.
        """
        self._ranks.require_all()
        try:
            began = self._clock()
            self.cache.advance_time(began)
            step = self._scheduler.schedule(only)
            self.last_step_ids = tuple(dict.fromkeys(row.branch.request.request_id for row in step.rows))
            is_idle = not step.rows and not step.preempted and not self.num_loading
            is_held = self.admission is not None and self.admission.is_holding
            if only is None and self.has_unfinished and is_idle and not is_held:
                raise InvariantError("no unfinished request can be scheduled; this is a bug, please report it")
            chosen = self._compute(step)
            if self.offload is not None:
                self.offload.note_computed(step.num_known, self._clock() - began)
            if self.admission is not None and any(row.count > 1 for row in step.rows):
                self.admission.estimate.note_step(step.num_known, self._clock() - began)
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
        """Ids of all waiting and running requests. O(requests)."""
        return frozenset(self._scheduler.requests())

    def prepare(self, name: str, prompt: Prompt, sampling: SamplingParams, extra_keys: Sequence[ExtraKey]) -> Request:
        """Return a checked request that is not queued, for `adopt`. Raises as `add_request`.

        `name` is the prompt's name in errors.
        """
        return self._input_processor.request(name, prompt, sampling, extra_keys=extra_keys)

    def adopt(self, request: Request, seq: int) -> None:
        """Run a prepared request whose prompt and first token were computed elsewhere; the engine takes over `seq`."""
        self._scheduler.adopt(request, seq)

    def detach(self, request_id: int, take: Callable[[int], _Taken]) -> _Taken:
        """Pass the sequence of a running request to `take`, drop the request, and return the result of `take`.

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
        """Carry out the block moves of a plan at once, outside a step."""
        self._scheduler.moves.note(plan)
        self._scheduler.moves.carry_out(self.kv_cache, self.state_slots)

    def close(self) -> None:
        """End the other ranks, the publisher of KV events and the tiers. A second call does nothing.

        Waits up to 5 seconds for stores in progress.
        """
        if self.offload is not None:
            self.offload.close(0.0 if self.rank_failure else _STORING_SECONDS)
        self._ranks.close()
        if self.kv_events is not None:
            self.kv_events.close()

    @property
    def rank_failure(self) -> str | None:
        """Reason why no steps are possible, such as a rank that has ended; None while they are."""
        return self._ranks.failure

    def ping_ranks(self) -> str | None:
        """Ask every rank for a sign of life; return why no step is possible now, or None if all answer.

        Thread-safe; may wait for seconds. It also finds ranks that are stopped, or killed but not yet reaped, which
        `rank_failure` does not report.
        """
        return self._ranks.ping()

    def on_rank_failure(self, call: Callable[[str], None]) -> None:
        """Call `call` with the reason, in a thread, once a rank has ended; at once if one has already ended."""
        self._ranks.on_failure(call)

    def _recover(self, keep: bool) -> None:
        """After a failed step or search, carry out the pending moves, or drop the cached blocks if that fails too."""
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
        """Return the tokens chosen for each row: none, consecutive ones, or a first token for each completion."""
        if step.plan is None:
            self._runner.carry_out(self._scheduler.moves)
            return []
        num_logits = [row.num_logits for row in step.rows]
        drafts = [token for row in step.rows for token in row.draft]
        batch = ForwardBatch.of(step.plan, self.cache.config.layer_groups, num_logits, drafts)
        logits = self._runner.run(batch, self._scheduler.moves)
        chooser = StepSampler(logits)
        chosen, first_row = [], 0
        for row in step.rows:
            chosen.append(_choices(chooser, row, first_row) if row.samples else [])
            first_row += row.num_logits
        return chosen

    def _conclude(self, step: ScheduledStep, chosen: list[list[Choice]]) -> StepReport:
        """Commit the step and distribute its tokens. If a tokenizer raises, no branch keeps any."""
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
        requests = dict.fromkeys(row.branch.request for row in step.rows)
        self._scheduler.retire([branch for branch in self._scheduler.running if branch.finish_reason is not None])
        finished = [request.result() for request in requests if request.is_finished]
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
            raise InvalidArgument(
                f"{call}: {number} requests of add_request are unfinished; call step until has_unfinished is False"
            )


def _carry_out(runner: StepRunner, scheduler: Scheduler, plan: StepPlan) -> None:
    """Carry out at once all moves of a plan that makes room for loads from tiers, after those already pending."""
    scheduler.note_fill(plan)
    runner.carry_out(scheduler.moves)


def _forks(branch: Branch) -> bool:
    return len(branch.request.branches) > 1 and not branch.request.is_forked


def _takers(branch: Branch) -> list[Branch]:
    """Return the branches that receive the tokens of a row: after a prompt, all branches of its request."""
    return branch.request.branches if _forks(branch) else [branch]


def _choices(chooser: StepSampler, row: StepRow, first_row: int) -> list[Choice]:
    branch, request = row.branch, row.branch.request
    num_prompt, stops = len(request.prompt_token_ids), request.stop_token_ids
    contexts = [SamplingContext(request.sampling, other.index, num_prompt, stops) for other in _takers(branch)]
    if _forks(branch):
        return [chooser.choose(first_row, context, branch.token_ids) for context in contexts]
    return chooser.verify(first_row, contexts[0], branch.token_ids, row.draft)


def _take(branch: Branch, choices: list[Choice]) -> list[NewToken]:
    taken = []
    for choice in choices:
        if branch.finish_reason is None:
            taken.append(branch.take(choice))
    return taken
