"""`blockyard replay` and `blockyard curve`: what they print, write and refuse."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from blockyard.cli.main import main

pytest.importorskip("joblib")
pytest.importorskip("matplotlib")

TRACE = "chat:requests=60,seed=3"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    status, out, _ = run(capsys, *arguments, "--json")
    assert status == 0
    found: dict[str, Any] = json.loads(out)
    return found


# ---------------------------------------------------------------- replay


def test_replay_prints_a_row_per_size(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "replay", "--jobs", "1")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("small.jsonl.gz: 320 requests one after another")
    assert lines[2].split()[:3] == ["policy", "blocks", "tokens"]
    assert len(lines) == 7 + 4 + 3 * 4


def test_replay_compares_paging_with_contiguous_memory(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "replay", "--blocks", "8192")
    assert status == 0
    rows = [line.split() for line in out.splitlines()[-3:]]
    assert [row[-3:-1] + row[-1:] for row in rows] == [["%", "16.0", "1.0"], ["%", "50.5", "3.2"], ["%", "82.2", "5.1"]]
    assert [row[-4] for row in rows] == ["76.41", "30.83", "0.41"]
    assert out.splitlines()[-3].startswith("the model's 8,192 tokens")
    found = run_json(capsys, "replay", "--blocks", "8192,8193", "--max-model-len", "4000")
    assert [entry["scheme"] for entry in found["reservations"]] == ["longest", "power of two", "paged"] * 2
    assert {entry["max_model_len"] for entry in found["reservations"]} == {4000}
    assert found["reservations"][2]["num_refused"] == found["runs"][0]["num_refused"] == 34
    _, out, _ = run(capsys, "replay", "--blocks", "8192", "--max-model-len", "4000")
    assert "left out" in out.splitlines()[-4]
    status, _, err = run(capsys, "replay", "--max-model-len", "0")
    assert status == 2
    assert "--max-model-len is 0" in err


def test_replay_prints_json_and_csv(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--policies", "lru,arc", "--blocks", "3000,20k", "--jobs", "1")
    found = run_json(capsys, "replay", TRACE, *options)
    assert [(entry["policy"], entry["num_blocks"]) for entry in found["runs"]] == [
        ("lru", 3000),
        ("lru", 20_000),
        ("arc", 3000),
        ("arc", 20_000),
    ]
    assert found["trace"]["num_requests"] == 60
    _, out, _ = run(capsys, "replay", TRACE, *options, "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [int(row["num_hit_tokens"]) for row in rows] == [entry["num_hit_tokens"] for entry in found["runs"]]
    assert [int(row["misses_evicted"]) for row in rows] == [entry["misses"]["evicted"] for entry in found["runs"]]


def test_replay_prints_a_row_per_tier_size(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--blocks", "400", "--kv-bytes", "1KiB", "--tier", "16MiB/1GiB,speed=1GB", "--tier", "2GiB,write=back")
    small, large = run_json(capsys, "replay", TRACE, *options, "--jobs", "1")["tiers"]
    assert [row["tier_bytes"] for row in (small, large)] == [[2**24, 2**31], [2**30, 2**31]]
    hits = [row["num_pool_tokens"] + sum(tier["num_hit_tokens"] for tier in row["tiers"]) for row in (small, large)]
    assert small["num_pool_tokens"] < hits[0] <= hits[1]
    assert hits[1] <= large["optimum"] * large["num_prompt_tokens"] * 1.01
    status, out, _ = run(capsys, "replay", TRACE, *options, "--jobs", "1")
    assert status == 0
    assert out.splitlines()[-3].split()[:4] == ["policy", "blocks", "tier", "1"]
    for bad, said in (
        ("1GiB,sped=1", "option sped must be one of"),
        ("1GiB,start=x", "start is 'x'; it must be seconds"),
        ("1GiB,start=-1", "start is '-1'; it must be seconds, 0 or more"),
        ("1GiB,start=inf", "start is 'inf'; it must be seconds, 0 or more"),
        ("1GiB,write=x", "write"),
        ("1GiB,write=back,write=never", "each option may be given only once"),
        ("1GiB/0GiB", "--tier is '1GiB/0GiB'; a size must be at least 1 byte"),
    ):
        status, _, err = run(capsys, "replay", TRACE, "--kv-bytes", "1KiB", "--tier", bad)
        assert status == 2
        assert said in err
    assert "--kv-bytes" in run(capsys, "replay", TRACE, "--tier", "1GiB")[2]


def test_optimum_with_tiers_leaves_out_refused_requests(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A prompt of 40 blocks comes five times, and one of 2 blocks four times, of which the last hits its first."""
    ids = [list(range(40)) if turn % 2 == 0 else [100, 101 if turn == 7 else 200 + turn] for turn in range(9)]
    lines = [{"timestamp": 0, "input_length": 512 * len(some), "output_length": 1, "hash_ids": some} for some in ids]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = (str(path), "--kv-bytes", "1KiB", "--block-size", "512", "--tier", "1GiB", "--jobs", "1")
    least, small, large = run_json(capsys, "replay", *asked, "--blocks", "2,20,200")["tiers"]
    assert [(row["num_requests"], row["num_refused"]) for row in (least, small, large)] == [(0, 9), (4, 5), (9, 0)]
    assert small["optimum"] == 3 / 8
    assert large["optimum"] == (4 * 40 + 3) / (5 * 40 + 8)
    assert least["optimum"] == 0
    points = run_json(capsys, "curve", *asked, "--blocks", "20,200")["sizes"]
    assert [point["optimum"] for point in points] == [small["optimum"], large["optimum"]]


def test_tier_curve_equals_replay_with_tiers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """By the size of a tier, and by that of the pool: each point is a replay of its own."""
    asked = ("--kv-bytes", "1KiB", "--jobs", "1")
    for blocks, tiers, num_points in (
        ("400", ("16MiB/64MiB/1GiB,speed=1GB", "2GiB,write=back"), 3),
        ("", ("9MiB",), 4),
    ):
        words = [word for text in tiers for word in ("--tier", text)]
        which = ("--blocks", blocks) if blocks else ("--sizes", "4")
        picture = tmp_path / f"{num_points}.svg"
        found = run_json(capsys, "curve", TRACE, *asked, *words, *which, "-o", str(picture))
        rows, points = found["tiers"], found["sizes"]
        assert len(rows) == len(points) == num_points
        for row, point in zip(rows, points, strict=True):
            alone = [
                f"{size}B,{text.partition(',')[2]}".rstrip(",")
                for size, text in zip(row["tier_bytes"], tiers, strict=True)
            ]
            words = [word for text in alone for word in ("--tier", text)]
            assert run_json(capsys, "replay", TRACE, *asked, *words, "--blocks", str(row["num_blocks"]))["tiers"] == [
                row
            ]
            tokens = row["num_prompt_tokens"]
            assert point["pool"] == row["num_pool_tokens"] / tokens
            assert [point[f"tier {at}"] for at in range(1, len(tiers) + 1)] == [
                tier["num_hit_tokens"] / tokens for tier in row["tiers"]
            ]
            assert point["all"] <= point["optimum"] * 1.01
            assert point["first token (s)"] == row["mean_seconds"]
            assert point["GiB a day to tier 1"] == row["tiers"][0]["written_bytes_a_day"] / 2**30
        assert [point["tokens"] for point in points] == [
            row["tier_bytes"][0] // 1024 if blocks else 16 * row["num_blocks"] for row in rows
        ]
        for part in ("Token hit rate by tier", "first token (s)", 'id="beside"'):
            assert part in picture.read_text()


def test_tier_curves_refuse_other_options(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (("--tier", "1GiB"), "--kv-bytes"),
        (("--tier", "1GiB/2GiB", "--kv-bytes", "1KiB"), "only one of them, the axis, may have several"),
        (("--tier", "1KiB", "--kv-bytes", "1KiB"), "1024 bytes cannot hold a block of 16 tokens"),
        (("--tier", "1GiB", "--kv-bytes", "1KiB", "--policies", "lru,arc"), "--policies is 'lru,arc'"),
        (("--tier", "1GiB", "--kv-bytes", "1KiB", "--beside", TRACE), "--beside was given with --tier"),
        (("--tier", "1GiB", "--kv-bytes", "1KiB", "--sizes", "0"), "sizes is 0; it must be from 2 to"),
        (("--seconds-per-prompt-token", "1"), "--seconds-per-prompt-token was given without --tier"),
    ):
        status, _, err = run(capsys, "curve", TRACE, *words)
        assert (status, said in err) == (2, True), err


def test_replay_reports_requests_that_never_fit(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "replay", "--blocks", "30")
    assert status == 0
    assert "requests never fit and were left out (request " in err
    assert "left out" in out
    status, out, err = run(capsys, "replay", "--blocks", "30", "--strict")
    assert (status, out) == (2, "")
    assert err.startswith("blockyard: request 1: it needs")


def test_timed_replay_prints_times(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "replay", TRACE, "--timed", "--blocks", "4000", "--max-num-seqs", "8")
    (entry,) = found["runs"]
    assert entry["simulated"]["num_steps"] > 60
    assert entry["peak_running"] <= 8
    assert set(entry["simulated"]["first_token"]) == {"p50", "p90", "p99"}
    _, out, _ = run(capsys, "replay", TRACE, "--timed", "--blocks", "4000")
    assert "TTFT p50" in out
    _, out, err = run(capsys, "replay", TRACE, "--timed", "--blocks", "4000", "--seconds-per-step", "100")
    assert "overloaded" in err
    _, out, _ = run(capsys, "replay", TRACE, "--timed", "--blocks", "4000", "--csv")
    assert "simulated_first_token_p99" in out.splitlines()[0]


def test_timed_replay_writes_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    options = ("--timed", "--policies", "lru,arc", "--blocks", "3000,4000", "--jobs", "2", "-o", str(path))
    found = run_json(capsys, "replay", TRACE, *options)
    assert [entry["policy"] for entry in found["runs"]] == ["lru", "lru", "arc", "arc"]
    assert "timeline" not in found["runs"][0]
    assert path.read_text(encoding="utf-8").count('<section class="run">') == 4
    status, _, err = run(capsys, "replay", TRACE, "-o", str(path))
    assert status == 2
    assert "only a replay with --timed" in err


def test_replay_counts_moves_to_the_cpu_pool(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--blocks", "1000", "--num-cpu-blocks", "20000")
    (entry,) = run_json(capsys, "replay", *options)["runs"]
    assert entry["num_saved_blocks"] > 100
    assert entry["num_fetched_blocks"] > 5000
    _, out, _ = run(capsys, "replay", *options)
    assert {"saved", "fetched"} <= set(out.splitlines()[2].split())
    assert "saved" not in run(capsys, "replay", TRACE, "--blocks", "4000")[1]


def test_replay_reports_missing_contents(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.0,100,5\n2024-05-10 00:00:01.0,50,5\n"
    )
    status, out, _ = run(capsys, "replay", str(path), "--blocks", "100")
    assert status == 0
    assert "it has no contents" in out
    status, _, err = run(capsys, "replay", str(path))
    assert status == 2
    assert "has lengths but no contents" in err


def test_skips_are_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    good = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
    path.write_text(good + "{\n" + good.replace("600", "-5"))
    status, _, err = run(capsys, "replay", str(path), "--blocks", "100")
    assert status == 0
    assert err.count("blockyard: 1 x ") == 2
    assert "trace.jsonl:2" in err
    assert len(run_json(capsys, "replay", str(path), "--blocks", "100")["trace"]["skips"]) == 2
    status, _, err = run(capsys, "replay", str(path), "--blocks", "100", "--strict")
    assert status == 2
    assert "trace.jsonl:2" in err


# ---------------------------------------------------------------- curve


def test_curve_writes_picture_and_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = [tmp_path / f"curve.{suffix}" for suffix in ("png", "svg", "html")]
    outputs = [part for name in names for part in ("-o", str(name))]
    status, out, err = run(capsys, "curve", "--sizes", "6", "--jobs", "1", "--model", "llama-3.1-8b", *outputs)
    assert (status, err) == (0, "")
    assert "knee of lru" in out
    assert "GiB" in out
    assert all(name.stat().st_size > 1000 for name in names)


def test_curve_prints_json_and_csv(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--policies", "lru,optimum", "--blocks", "100,1000,100%", "--jobs", "1")
    found = run_json(capsys, "curve", TRACE, *options)
    sizes = [row["blocks"] for row in found["sizes"]]
    assert sizes == [100, 1000, found["working_set"]]
    assert all(row["lru"] <= row["optimum"] for row in found["sizes"])
    assert found["sizes"][-1]["lru"] == pytest.approx(found["infinite"])
    _, out, _ = run(capsys, "curve", TRACE, *options, "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [float(row["lru"]) for row in rows] == [row["lru"] for row in found["sizes"]]


def test_the_knee_does_not_depend_on_the_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    knees = [
        run_json(capsys, "curve", "--policies", policies, "--blocks", sizes, "--jobs", "1")["knee"]
        for policies, sizes in (("lru", "1k,15k"), ("lru", "1k,3k,15k"), ("fifo", "2k,16k"))
    ]
    assert knees[0] == knees[1] == knees[2]
    assert (knees[0]["policy"], knees[0]["blocks"]) == ("lru", 4576)


def test_two_traces_share_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ("curve", TRACE, "--beside", "agents:requests=10,seed=3", "--sizes", "3", "--jobs", "1")
    status, out, err = run(capsys, *options, "-o", str(tmp_path / "two.svg"), "-o", str(tmp_path / "two.html"))
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("A: chat:requests=60")
    assert lines[1].startswith("B: agents:requests=10")
    for name in ("lru A", "optimum A", "lru B", "optimum B"):
        assert name in lines[3]
    assert [line[:15] for line in lines[-3:-1]] == ["knee of lru A: ", "knee of lru B: "]
    found = run_json(capsys, *options)
    assert [trace["num_requests"] for trace in found["traces"]] == [60, 10]
    assert found["traces"][0]["sizes"][2]["blocks"] == found["traces"][1]["sizes"][2]["blocks"]
    _, out, _ = run(capsys, *options, "--csv")
    assert out.splitlines()[0] == "blocks,tokens,lru A,optimum A,lru B,optimum B"
    status, _, err = run(capsys, "curve", TRACE, "--beside", "chat:requests=9,hash_block_size=32")
    assert status == 2
    assert "need equal blocks" in err


def test_curves_begin_where_something_hits(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "curve", "--policies", "lru", "--jobs", "1")
    assert [found["sizes"][0]["blocks"], found["sizes"][-1]["blocks"]] == [17, found["working_set"]]
    assert len(found["sizes"]) == 40


def test_sampled_curve_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "curve", TRACE, "--policies", "lru", "--sizes", "3", "--max-references", "1024")
    assert "a sample of one content in" in out
    assert "lru error" in out


def test_progress_bars_are_for_terminals_only(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = run(capsys, "curve", TRACE, "--policies", "fifo", "--sizes", "3", "--jobs", "1")
    assert err == ""


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("replay", "nowhere.jsonl"), "nowhere.jsonl"),
        (("replay", "--policies", "lur"), "'lur'"),
        (("replay", "--policies", "optimum"), "blockyard curve"),
        (("replay", "--blocks", "many"), "'many'"),
        (("replay", "--blocks", "200M"), "200000000"),
        (("replay", "--block-size", "0"), "block_size is 0"),
        (("replay", "--watermark", "2"), "watermark"),
        (("replay", "--timed", "--speedup", "0"), "speedup"),
        (("replay", "--timed", "--seconds-per-step", "nan"), "seconds_per_step"),
        (("replay", "--timed", "--seconds-per-moved-block", "-1"), "seconds_per_moved_block"),
        (("replay", "--num-cpu-blocks", "1"), "num_cpu_blocks is 1"),
        (("replay", "--timed", "-o", "run.png"), "run.png"),
        (("replay", "--jobs", "0"), "jobs is 0"),
        (("replay", "--backend", "spark"), "backend is 'spark'"),
        (("replay", "--max-requests", "0"), "max_requests"),
        (("replay", "chat:requests=ten"), "requests"),
        (("replay", "nothing:requests=10"), "nothing"),
        (("curve", "-o", "curve.pdf"), "curve.pdf"),
        (("curve", "-o", "no/such/folder/curve.png", "--sizes", "2", "--policies", "lru"), "folder"),
        (("curve", "--sizes", "1"), "sizes is 1; it must be from 2 to 10000"),
        (("curve", "--model", "llama-9"), "llama-9"),
        (("curve", "--max-references", "5"), "max_references is 5"),
        (("curve", "--format", "parquet"), "parquet"),
    ],
)
def test_refusals_are_one_sentence(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    what: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("blockyard: ")
    assert what in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
