"""What the manager's callers give, read and checked."""

from mypy_extensions import i64

from ..arguments import require_int, shown
from ..errors import InvalidArgument
from .calls.in_flight import NO_STEP, InFlight
from .face import read_int, read_str
from .index.prompt import Prompt, make_prompt
from .tokens import LAST_TOKEN, int64_items

#: Most boundaries that can be told of a prompt, and most prompts that wait.
MAX_BOUNDARIES = 4096
MAX_WAITING = 64


def read_prompts(prompts: object, extra_keys: object, block_size: int) -> list[Prompt]:
    """Return the prompts of a batch, which have their extra keys in common."""
    if not isinstance(prompts, (list, tuple)) or not prompts:
        raise InvalidArgument(f"prompts is {type(prompts).__name__}; a list of at least 1 prompt is needed")
    return [make_prompt(tokens, extra_keys, block_size) for tokens in prompts]


def read_boundaries(boundaries: object, num_tokens: int) -> list[int]:
    """Return the positions in a prompt of `num_tokens` tokens that a caller names, each once and in order."""
    if boundaries is None:
        return []
    items = int64_items("boundaries", boundaries)
    if len(items) > MAX_BOUNDARIES:
        raise InvalidArgument(f"boundaries has {len(items)} items; the limit is {MAX_BOUNDARIES}")
    found: set[int] = set()
    for place in range(i64(len(items))):
        if not 1 <= items[place] <= num_tokens:
            raise InvalidArgument(
                f"boundaries[{place}] is {items[place]}; it must be from 1 to the {num_tokens} tokens of the prompt"
            )
        found.add(int(items[place]))
    return sorted(found)


def read_partings(waiting: object, prompt: Prompt, block_size: int) -> list[int]:
    """Return where a prompt parts from each of those that wait, in tokens of whole blocks, each once and in order."""
    if not isinstance(waiting, (list, tuple)):
        raise InvalidArgument(f"waiting is {shown(waiting)}; a list of prompts is needed")
    if len(waiting) > MAX_WAITING:
        raise InvalidArgument(f"waiting has {len(waiting)} prompts; the limit is {MAX_WAITING}")
    found: set[int] = set()
    for tokens in waiting:
        other = make_prompt(tokens, (), block_size)
        last = (min(prompt.num_tokens, other.num_tokens) - 1) // i64(block_size)
        words = i64((block_size + 1) // 2)
        alike: i64 = 0
        while alike < last * words and prompt.words[alike] == other.words[alike]:
            alike += 1
        found.add(int(alike // words * block_size))
    return sorted(found - {0})


def read_holders(holders: object, num_seqs: int, default: str | None) -> list[str]:
    """Return a name for each sequence. Where none are given: `default` for each, or no names if it is None."""
    given: list[object] = list(holders) if isinstance(holders, (list, tuple)) else [holders]
    if not isinstance(holders, (list, tuple)) or len(given) not in (0, num_seqs):
        raise InvalidArgument(f"holders is {shown(holders)}; {num_seqs} names are needed, one for each sequence")
    names = [read_str(f"holders[{i}]", name) for i, name in enumerate(given)]
    return names if names or default is None else [default] * num_seqs


def read_committed(step: object, in_flight: InFlight | None) -> i64:
    """Return the step that `commit` names; `NO_STEP` where steps have no numbers."""
    if in_flight is None:
        if step is not None and require_int("step", step, 0, LAST_TOKEN) != 0:
            raise InvalidArgument(f"step is {shown(step)}; with max_steps_in_flight 1 steps have no numbers: 0 or None")
        return NO_STEP
    begun = in_flight.fence.num_begun
    if step is None:
        raise InvalidArgument(
            f"step is None; with max_steps_in_flight {in_flight.fence.max_steps}, commit needs plan.step, the step "
            f"that was computed"
        )
    if begun == 0:
        raise InvalidArgument(f"step is {shown(step)}; no step was reserved yet")
    return read_int("step", step, 1, begun)


def read_ended(step: object, in_flight: InFlight) -> i64:
    """Return the step that `end_step` names: one that is in flight."""
    first = in_flight.fence.num_ended + 1
    last = in_flight.fence.num_begun
    if first > last:
        raise InvalidArgument(f"step is {shown(step)}; no step is in flight")
    return read_int("step", step, first, last)
