"""The adapter for vLLM: what it asks of vLLM and of Blockyard, its options, and the suite's own bookkeeping.

With vLLM (`make interop-vllm`) the installed one is compared too.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from blockyard.policies import POLICIES
from blockyard.signatures import arguments_of
from blockyard_testing.outcomes import failures, outcomes_in, table, unexplained
from blockyard_testing.places import ROOT, child_environment, source_of
from blockyard_vllm import adapter_options as options
from blockyard_vllm import misses

from ..interop.vllm_suite import everything
from ..interop.vllm_suite.known import KNOWN, KNOWN_OF_CONNECTORS

ADAPTER = source_of("blockyard_vllm")
HAS_VLLM = importlib.util.find_spec("vllm") is not None


def test_blockyard_does_not_import_vllm() -> None:
    program = "import sys, blockyard; assert 'vllm' not in sys.modules; assert 'blockyard_vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], env=child_environment(), check=True)


@pytest.mark.parametrize("path", sorted(ADAPTER.glob("*.py")), ids=lambda path: path.name)
def test_only_public_attributes_of_pools_are_used(path: Path) -> None:
    """`pool._x`, `named._x`, `lease._x` and `found._x` would be private things of ours."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = ast.unparse(node.value).rpartition(".")[2]
            assert owner not in ("pool", "named", "lease", "found"), ast.unparse(node)


@pytest.mark.parametrize("version", options.VLLM_VERSIONS)
def test_moved_method_is_named(version: str) -> None:
    expected: dict[str, str] = options.CONTRACTS[version]
    assert options.moved_methods(expected, expected.__getitem__) == []
    for name, arguments in expected.items():
        method = name.rpartition(":")[2]
        gone = options.moved_methods(expected, (expected | {name: ""}).__getitem__)
        assert gone == [f"{method} is gone"]
        moved = options.moved_methods(expected, (expected | {name: f"{arguments}, more="}).__getitem__)
        assert moved == [f"{method}({arguments}, more=); the adapter knows ({arguments})"]


def test_arguments_are_read_from_a_function() -> None:
    def method(self: Any, first: int, second: int = 3, *, third: bool = False) -> None: ...

    assert arguments_of(method) == "self, first, second=, third="


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed here: `make interop-vllm` has an environment with it")
def test_installed_vllm_matches_the_contract() -> None:
    options.require_known_vllm()


def test_options_are_parsed() -> None:
    assert options.options_of(None) == options.options_of({}) == options.options_of({"other": 1}) == options.Options()
    given = options.options_of({"blockyard": {"level": "names", "eviction_policy": "s3fifo"}})
    assert (given.level, given.eviction_policy, given.only_for_tokens) == ("names", "s3fifo", [])
    assert options.options_of({"blockyard": {"residency_sample": 4}}).only_for_tokens == ["residency_sample"]
    rules = ["branch", "every:512", "waiting", "requested"]
    assert options.options_of({"blockyard": {"state_checkpoints": rules}}).state_checkpoints == tuple(rules)
    for name in POLICIES:
        assert options.options_of({"blockyard": {"eviction_policy": name}}).eviction_policy == name


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"blockyard": {"policy": "lru"}}, r"has 'policy'; it may have level, eviction_policy"),
        ({"blockyard": {"level": "best"}}, r"level is 'best'; it must be one of auto, tokens, names"),
        ({"blockyard": "lru"}, r"is 'lru'; it must be a dict"),
        (
            {"blockyard": {"eviction_policy": "best"}},
            r"eviction_policy is 'best'; it must be one of arc, density, fifo, lfu, lru, s3fifo, score$",
        ),
        ({"blockyard": {"eviction_policy": "best:lru"}}, r"eviction_policy is 'best:lru'; it must be one of"),
        ({"blockyard": {"eviction_policy": ["lru"]}}, r"eviction_policy is \['lru'\]; it must be one of"),
        ({"blockyard": {"eviction_policy": None}}, r"eviction_policy is None; it must be one of"),
        (
            {"blockyard": {"state_checkpoints": ["best"]}},
            r"state_checkpoints is \['best'\]; it must be a list of names of last, ",
        ),
        ({"blockyard": {"state_checkpoints": "branch"}}, r"state_checkpoints is 'branch'; it must be a list"),
        (
            {"blockyard": {"state_checkpoints": [5, "every:0"]}},
            r"state_checkpoints is \[5, 'every:0'\]; .*, requested, or every:N",
        ),
    ],
)
def test_unknown_options_are_refused(given: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        options.options_of(given)


RESULTS = """<testsuites><testsuite>
<testcase classname="tests.v1.core.test_a" name="test_one"/>
<testcase classname="tests.v1.core.test_a" name="test_two[x-1]"><failure message="no">.</failure></testcase>
<testcase classname="tests.v1.core.test_b" name="test_three"><skipped/></testcase>
<testcase classname="tests.v1.core.test_b.TestPool" name="test_four"/>
</testsuite></testsuites>"""


def test_a_run_of_vllms_tests_is_read_and_compared(tmp_path: Path) -> None:
    (tmp_path / "results.xml").write_text(RESULTS)
    ours = outcomes_in(tmp_path / "results.xml")
    assert ours == {
        "tests/v1/core/test_a.py::test_one": "passed",
        "tests/v1/core/test_a.py::test_two[x-1]": "failed",
        "tests/v1/core/test_b.py::test_three": "skipped",
        "tests/v1/core/test_b.py::TestPool::test_four": "passed",
    }
    stock = ours | {"tests/v1/core/test_a.py::test_two[x-1]": "passed"}
    assert table(stock, ours)[2:] == [
        "| core/test_a.py | 2 | 2 | 1 |",
        "| core/test_b.py | 2 | 1 | 1 |",
        "| all | 4 | 3 | 2 |",
    ]
    (line,) = unexplained(stock, ours, {})
    assert line.startswith("tests/v1/core/test_a.py::test_two[x-1] fails on Blockyard")
    assert unexplained(stock, ours, {"test_a.py::test_two[x-1]": "a reason"}) == []
    (line,) = unexplained(stock, stock, {"test_a.py::test_one": "a reason"})
    assert "passes on Blockyard, but known.py says: a reason" in line


def test_a_test_that_fails_with_stock_vllm_is_not_counted() -> None:
    stock = {"tests/v1/core/test_a.py::test_one[a/b]": "passed", "tests/v1/core/test_a.py::test_two": "failed"}
    ours = dict.fromkeys(stock, "failed")
    assert failures(stock, ours, {"test_a.py::test_one[a/b]": "a reason"}) == [
        "- tests/v1/core/test_a.py::test_one[a/b]: a reason",
        "- tests/v1/core/test_a.py::test_two: fails with stock vLLM here too",
    ]
    assert failures(stock, ours, {})[0].endswith("NOT KNOWN")


def test_hanging_part_is_stopped() -> None:
    """A part that takes too long is ended, failures are reported, and its output is kept."""
    for limit in (3, 30):
        sleeps = everything.Part(
            "sleeps", limit, ("timeit", "-n1", "-r1", "print('begun', flush=True)\nimport time; time.sleep(600)")
        )
        outcome = everything.run(sleeps, "python")
        if outcome.said:  # on a busy machine Python itself may take longer than three seconds to begin
            break
    assert (outcome.status, outcome.said) == (None, "begun\n")
    assert limit <= outcome.seconds < 500
    assert everything.verdict(sleeps, outcome) == f"ended after {limit} s"
    says = everything.Part("says", 50, ("timeit", "-n1", "-r1", "print('{python}')"))
    outcome = everything.run(says, "a python")
    assert outcome.status == 0
    assert outcome.said.startswith("a python\n")
    assert everything.verdict(says, outcome) == "as it should be"
    fails = everything.run(everything.Part("fails", 50, ("timeit", "not Python")), "python")
    assert everything.verdict(says, fails) == "WRONG (exit status 1)"


def test_the_summary_lists_all_parts() -> None:
    outcomes = {
        name: everything.Outcome(f"{name} said", 1.2, number % 2) for number, name in enumerate(everything.PARTS)
    }
    lines = everything.summary(outcomes)
    assert sum("as it should be" in line for line in lines) == 3
    assert {f"{name} said" for name in outcomes} <= set(lines)
    assert len(outcomes) == 6


def test_every_known_failure_has_a_reason_and_is_documented() -> None:
    page = (ROOT / "docs" / "vllm.md").read_text()
    assert len(KNOWN) <= 10
    for name, reason in (KNOWN | KNOWN_OF_CONNECTORS).items():
        assert len(reason) > 30
        assert name.partition("::")[2].partition("[")[0] in page


# ---------------------------------------------------------------- causes of misses


class Asking:
    """The part of vLLM's request that the log of misses reads."""

    def __init__(self, tokens: list[int], salt: str | None = None, adapter: str = "", num_preemptions: int = 0) -> None:
        self.all_token_ids, self.cache_salt, self.num_preemptions = tokens, salt, num_preemptions
        self.num_tokens = len(tokens)
        self.request_id = f"{tokens} {salt} {adapter}"
        self.lora_request = SimpleNamespace(name=adapter, path=f"/{adapter}") if adapter else None
        ends = range(4, len(tokens) + 1, 4)
        self.block_hashes = [repr((tokens[:end], salt, adapter)).encode() for end in ends]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A log for blocks of four tokens, without Prometheus."""
    monkeypatch.setattr(misses, "counter", MagicMock())
    return misses.StepMisses(100, 4)


def new_causes(log: Any, request: Asking, num_hits: int = 0) -> dict[str, int]:
    """Return the causes that a request adds when it is admitted; its full blocks are then cached."""
    before = dict(log.totals)
    log.record_lookup(request, num_hits)
    log.count_admission(request)
    for block_hash in request.block_hashes[num_hits // 4 :]:
        log.note_cached(block_hash)
    return {cause: tokens - before[cause] for cause, tokens in log.totals.items() if tokens != before[cause]}


def test_tokens_cached_under_other_keys_have_a_cause_of_their_own(log: Any) -> None:
    tokens = list(range(9))
    assert new_causes(log, Asking(tokens, "a")) == {"never_seen": 8, "tail": 1}
    assert new_causes(log, Asking(tokens, "b")) == {"other_keys": 8, "tail": 1}
    assert new_causes(log, Asking(tokens)) == {"other_keys": 8, "tail": 1}
    assert new_causes(log, Asking(tokens, adapter="poet")) == {"other_keys": 8, "tail": 1}
    assert new_causes(log, Asking(tokens, adapter="poet"), 8) == {"hit": 8, "tail": 1}
    assert new_causes(log, Asking([*tokens[:4], 7, 7, 7, 7, 7], adapter="poet"), 4) == {
        "hit": 4,
        "never_seen": 4,
        "tail": 1,
    }, "what is found has these keys"
    assert new_causes(log, Asking([5, *tokens])) == {"never_seen": 8, "tail": 2}


def test_evicted_tokens_do_not_count_as_other_keys(log: Any) -> None:
    tokens = list(range(9))
    first = Asking(tokens, "a")
    new_causes(log, first)
    new_causes(log, Asking(tokens, "b"))
    for block_hash in first.block_hashes:
        log.note_removed(block_hash)
    assert new_causes(log, first) == {"evicted": 8, "tail": 1}


def test_a_prompt_shorter_than_a_block_has_no_first_block(log: Any) -> None:
    assert new_causes(log, Asking([1, 2, 3], "a")) == {"tail": 3}
    assert log.first_blocks == {}
    assert new_causes(log, Asking([1, 2, 3], "b")) == {"tail": 3}


def test_first_blocks_are_bounded_and_the_latest_stay(log: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misses, "MAX_FIRST_BLOCKS", 2)
    for number in (1, 2, 1, 3):
        new_causes(log, Asking([number] * 5, "a"))
    assert len(log.first_blocks) == 2
    assert new_causes(log, Asking([1] * 5, "b"))["other_keys"] == 4
    assert new_causes(log, Asking([2] * 5, "b"))["never_seen"] == 4, "forgotten"


def test_preempted_request_is_counted_once(log: Any) -> None:
    assert new_causes(log, Asking(list(range(9)), "a", num_preemptions=1)) == {}
