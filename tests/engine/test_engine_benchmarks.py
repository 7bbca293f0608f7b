"""The parts of `benchmarks.engines`, on a tiny model and without vLLM. No time is asserted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from benchmarks.engines.agreement import agreement
from benchmarks.engines.contestant import Answer, Contestant
from benchmarks.engines.hugging import Generate, GenerateBatch
from benchmarks.engines.ours import Blockyard
from benchmarks.engines.prefix import Gain, Talk, Turn, gains
from benchmarks.engines.rounds import play
from benchmarks.engines.table import table_lines
from benchmarks.engines.vllm_process import VLLM, LeftOut
from benchmarks.engines.work import Size, Work, work_of

from blockyard_testing.tiny_models import VOCAB_SIZE, reference_tokens, tiny_model

SIZE = Size(num_requests=3, num_prompt_tokens=21, num_new=5)


def test_all_engines_give_the_same_tokens_in_every_round() -> None:
    model = tiny_model("llama-gqa")
    works = [work_of(SIZE, VOCAB_SIZE, number) for number in range(3)]
    standings = play([Blockyard(model, SIZE), Generate(model), GenerateBatch(model, SIZE)], works.__getitem__, 2)
    ours, *others = standings
    assert [answer.token_ids for answer in ours.answers] == [
        reference_tokens(model, work.prompts, SIZE.num_new) for work in works[1:]
    ]
    found = {other.contestant.name: agreement(model, works[1:], ours.answers, other.answers) for other in others}
    assert [(each.num_equal, each.is_sound) for each in found.values()] == [(6, True)] * 2
    lines = list(table_lines(standings, found))
    assert len(lines) == 5
    assert lines[2].startswith("| Blockyard | ")
    assert all(line.endswith("| 6 equal |") for line in lines[3:])


def test_rounds_share_no_prompt() -> None:
    first, second = work_of(SIZE, VOCAB_SIZE, 1), work_of(SIZE, VOCAB_SIZE, 2)
    assert first == work_of(SIZE, VOCAB_SIZE, 1)
    assert not {tuple(prompt) for prompt in first.prompts} & {tuple(prompt) for prompt in second.prompts}


def test_a_token_that_no_rounding_explains_is_seen() -> None:
    model = tiny_model("llama-gqa")
    work = work_of(SIZE, VOCAB_SIZE, 1)
    right = reference_tokens(model, work.prompts, SIZE.num_new)
    wrong = [right[0], right[1], [*right[2][:3], (right[2][3] + 1) % VOCAB_SIZE, right[2][4]]]
    found = agreement(model, [work], [Answer(right, 1.0)], [Answer(wrong, 1.0)])
    assert (found.num_equal, found.num_tied, found.num_other) == (2, 0, 1)
    assert not found.is_sound
    assert str(found) == "2 equal, 1 DIFFERENT"


class _Fixed(Contestant):
    """Takes the seconds that it was told to, and gives as many tokens."""

    version = "1"

    def __init__(self, name: str, seconds: list[float], num_tokens: int, order: list[str]) -> None:
        self.name, self._seconds, self._num_tokens, self._order = name, seconds, num_tokens, order

    def answer(self, work: Work) -> Answer:
        self._order.append(self.name)
        return Answer([[1] * self._num_tokens] * len(work.prompts), self._seconds.pop(0))


def test_contestants_take_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []
    work = work_of(SIZE, VOCAB_SIZE, 0)
    a = _Fixed("a", [99.0, 1.0, 2.0, 3.0], SIZE.num_new, order)
    b = _Fixed("b", [99.0, 2.0, 8.0, 9.0], SIZE.num_new, order)
    first, second = play([a, b], lambda number: work, 3)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert first.rates == [15.0, 7.5, 5.0]
    assert first.ratio_to(second) == 3.0  # of 2, 4 and 3


def test_too_few_tokens_are_no_answer() -> None:
    with pytest.raises(RuntimeError, match="a gave"):
        play([_Fixed("a", [1.0, 1.0], SIZE.num_new - 1, [])], lambda number: work_of(SIZE, VOCAB_SIZE, number), 1)


@pytest.mark.parametrize("python", ["no-such-interpreter", sys.executable])
def test_vllm_that_is_not_there_is_left_out(python: str, tmp_path: Path) -> None:
    with pytest.raises(LeftOut, match=r"no-such-interpreter|No module named 'vllm'"):
        VLLM(python, tmp_path, "float32", SIZE)


def test_the_prefix_cache_changes_no_token_and_hits_both_turns() -> None:
    talk = Talk(num_requests=4, num_system=70, num_question=6, num_answer=5)
    (first, second), (third, _) = gains(tiny_model("llama-gqa"), talk, 2)
    shared = 64  # of 70 tokens, whole blocks of 16; who computes them first finds nothing
    assert first.num_cached == third.num_cached == 3 * shared
    assert second.num_cached == 4 * 80  # of 81 tokens, the last of which was never computed


def test_a_cache_that_changes_tokens_is_refused() -> None:
    with pytest.raises(RuntimeError, match="differ"):
        Gain.of(Turn(1.0, 1.0, 0, [[1, 2]]), Turn(1.0, 1.0, 0, [[1, 3]]))
