"""The exercises that courses begin with print what those courses say."""

from __future__ import annotations

import re
import runpy

import pytest

from blockyard_testing.places import ROOT


@pytest.fixture
def printed(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> str:
    """What the example named by the test's parameter prints."""
    runpy.run_path(str(ROOT / "examples" / request.param), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("printed", ["trace_allocation.py"], indirect=True)
def test_fifty_tokens_take_four_blocks_of_ten(printed: str) -> None:
    lines = re.findall(r"logical block (\d) -> block (\d), ref_cnt (\d): tokens (\d+) to (\d+)", printed)
    assert lines == [
        ("0", "1", "1", "0", "15"),
        ("1", "2", "1", "16", "31"),
        ("2", "3", "1", "32", "47"),
        ("3", "4", "1", "48", "49"),
    ]
    assert re.findall(r"(?:an empty pool|allocate 50 tokens) +(.*)", printed) == [
        "0 used, 10 free, 0 cached",
        "4 used, 6 free, 3 cached",
    ]


@pytest.mark.parametrize("printed", ["copy_on_write.py"], indirect=True)
def test_a_block_that_b_shares_and_writes_has_one_holder_again(printed: str) -> None:
    assert re.findall(r"block 1: ref_cnt (\d)", printed.split("\n\n")[0]) == ["1", "2", "1"]
    assert "A has [1, 2], B has [3]\nblock 1: ref_cnt 1; block 3: ref_cnt 1\n" in printed


@pytest.mark.parametrize("printed", ["copy_on_write.py"], indirect=True)
def test_the_second_sequence_gets_the_copy(printed: str) -> None:
    forked, parent, child = re.findall(r"(?:fork|parent|child) +(block .*)", printed)
    assert forked == "block 1: ref_cnt 2, block 2: ref_cnt 2"
    assert parent == "block 1: ref_cnt 2, block 2: ref_cnt 1"
    assert child == "block 1: ref_cnt 2, block 3: ref_cnt 1"
    assert printed.count("copy block") == 1


@pytest.mark.parametrize("printed", ["hit_rates.py"], indirect=True)
def test_a_prefix_shorter_than_a_block_hits_nothing(printed: str) -> None:
    assert printed.splitlines()[:3] == [
        "a token a byte, in blocks of 16: 6 of 12 blocks (50.0%), 55.5% of 173 tokens",
        "a token a word, in blocks of 16: 0 of 4 blocks (0.0%), 0.0% of 26 tokens",
        "a token a word, in blocks of 4: 3 of 8 blocks (37.5%), 46.2% of 26 tokens",
    ]
