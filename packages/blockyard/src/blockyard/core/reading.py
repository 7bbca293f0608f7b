"""Checks arguments of the manager and converts them for the calls."""

from mypy_extensions import i64

from ..arguments import require_int, shown
from ..errors import InvalidArgument
from ..state_hints import StateHints
from .calls.in_flight import NO_STEP, InFlight, Steps
from .face import read_int, read_str
from .index.prompt import Prompt, make_prompt
from .tokens import LAST_TOKEN, int64_items

MAX_CHECKPOINTS = 4096
MAX_WAITING_PROMPTS = 64


def read_prompts(prompts: object, extra_keys: object, block_size: int) -> list[Prompt]:
    """Return the prompts of a batch, all with the same extra keys."""
    if not isinstance(prompts, (list, tuple)) or not prompts:
        raise InvalidArgument(f"prompts is {shown(prompts)}; it must be a list of at least 1 prompt")
    return [make_prompt(tokens, extra_keys, block_size) for tokens in prompts]


def read_state_hints(states: object, prompt: Prompt, block_size: int) -> None:
    """Store in a prompt the hints that its caller gave about its states."""
    if not isinstance(states, StateHints):
        raise InvalidArgument(f"states is {shown(states)}; it must be a StateHints")
    prompt.checkpoints = read_checkpoints(states.checkpoints, int(prompt.num_tokens))
    prompt.branches = read_branches(states.waiting_prompts, prompt, block_size)
    prompt.external_state_tokens = read_int("external_state_tokens", states.external_state_tokens, 0, prompt.num_tokens)


def read_checkpoints(checkpoints: object, num_tokens: int) -> list[int]:
    """Return the checkpoint positions that a caller requests for a prompt, sorted and without duplicates."""
    items = int64_items("checkpoints", checkpoints)
    if len(items) > MAX_CHECKPOINTS:
        raise InvalidArgument(f"checkpoints has {len(items)} items; the limit is {MAX_CHECKPOINTS}")
    found: set[int] = set()
    for index in range(i64(len(items))):
        if not 1 <= items[index] <= num_tokens:
            raise InvalidArgument(
                f"checkpoints[{index}] is {items[index]}; it must be from 1 to the {num_tokens} tokens of the prompt"
            )
        found.add(int(items[index]))
    return sorted(found)


def read_branches(waiting_prompts: object, prompt: Prompt, block_size: int) -> list[int]:
    """Return where a prompt diverges from each waiting one, in tokens of whole blocks, sorted, without duplicates."""
    if not isinstance(waiting_prompts, (list, tuple)):
        raise InvalidArgument(f"waiting_prompts is {shown(waiting_prompts)}; it must be a list of prompts")
    if len(waiting_prompts) > MAX_WAITING_PROMPTS:
        raise InvalidArgument(f"waiting_prompts has {len(waiting_prompts)} prompts; the limit is {MAX_WAITING_PROMPTS}")
    found: set[int] = set()
    for tokens in waiting_prompts:
        other = make_prompt(tokens, (), block_size)
        last = (min(prompt.num_tokens, other.num_tokens) - 1) // i64(block_size)
        words = i64((block_size + 1) // 2)
        alike: i64 = 0
        while alike < last * words and prompt.words[alike] == other.words[alike]:
            alike += 1
        found.add(int(alike // words * block_size))
    return sorted(found - {0})


def read_holders(holders: object, num_seqs: int, default: str | None) -> list[str]:
    """Return a name for each sequence. If none are given, each is `default`, or the list is empty if that is None."""
    given: list[object] = list(holders) if isinstance(holders, (list, tuple)) else [holders]
    if not isinstance(holders, (list, tuple)) or len(given) not in (0, num_seqs):
        raise InvalidArgument(f"holders is {shown(holders)}; it must have {num_seqs} names, one for each sequence")
    names = [read_str(f"holders[{i}]", name) for i, name in enumerate(given)]
    return names if names or default is None else [default] * num_seqs


def read_committed(step: object, steps: Steps) -> i64:
    """Return the step that `commit` was given; `NO_STEP` if steps have no numbers."""
    if not isinstance(steps, InFlight):
        if step is not None and require_int("step", step, 0, LAST_TOKEN) != 0:
            raise InvalidArgument(
                f"step is {shown(step)}; steps are not numbered unless max_steps_in_flight > 1: pass None"
            )
        return NO_STEP
    begun = steps.fence.num_begun
    if step is None:
        raise InvalidArgument(
            f"step is None; with max_steps_in_flight {steps.fence.max_steps}, commit needs plan.step, the step "
            f"that was computed"
        )
    if begun == 0:
        raise InvalidArgument(f"step is {shown(step)}; no step has been reserved yet")
    return read_int("step", step, 1, begun)


def read_ended(step: object, in_flight: InFlight) -> i64:
    """Return the step that `end_step` was given, which must be in flight."""
    first = in_flight.fence.num_ended + 1
    last = in_flight.fence.num_begun
    if first > last:
        raise InvalidArgument(f"step is {shown(step)}; no step is in flight")
    return read_int("step", step, first, last)
