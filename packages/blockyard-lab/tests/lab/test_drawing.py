"""The picture of hit-rate curves has every point and every name unchanged, and is the same each time."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from blockyard.core.policies import POLICIES
from blockyard.errors import InvalidArgument
from blockyard_lab.curve import HitCurves, combine_curves
from blockyard_lab.curve.captions import gap_of, knee_of, subtitle_of
from blockyard_lab.curve.drawing import draw_curves
from blockyard_lab.curve.labels import spread_labels
from blockyard_lab.curve.side_by_side import COLORS, line_styles, line_styles_of
from blockyard_lab.printing import compact, keep_end, printable, sentence
from blockyard_testing.places import child_environment

from ..support.made_curves import HOSTILE, awkward_curves, made_curves, plain_curves, sampled_curves, two_traces

matplotlib = pytest.importorskip("matplotlib")

SVG = "{http://www.w3.org/2000/svg}"
AWKWARD = awkward_curves()


def svg_of(curves: HitCurves, folder: Path, **options: Any) -> ElementTree.Element:
    path = folder / "curves.svg"
    draw_curves(curves, path, **options)
    return ElementTree.fromstring(path.read_bytes())


def texts_of(svg: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in svg.iter(f"{SVG}text")]


def points_of(svg: ElementTree.Element, group: str) -> NDArray[np.float64]:
    """Return the corners of the first path in a group, (P, 2) in the picture's points; y grows downwards."""
    (found,) = [element for element in svg.iter(f"{SVG}g") if element.get("id") == group]
    path = next(found.iter(f"{SVG}path")).get("d") or ""
    # An area is defined once and then used at a place; the points of a line stand where they are.
    used = None if group.startswith(("policy", "above")) else next(found.iter(f"{SVG}use"))
    moved = (0, 0) if used is None else (used.get("x"), used.get("y"))
    points = [[float(x), float(y)] for x, y in re.findall(r"[ML] (\S+) (\S+)", path)]
    return np.array(points) + np.array(moved, np.float64)


def policies_are_drawn(svg: ElementTree.Element, curves: HitCurves) -> None:
    """Check that one linear scale per axis maps every policy's numbers to the points drawn."""
    drawn = np.concatenate([points_of(svg, f"policy-{number}") for number in range(len(curves.hit_rates))])
    sizes = np.log(np.tile(curves.sizes, len(curves.hit_rates)))
    for pixels, values in ((drawn[:, 0], sizes), (drawn[:, 1], np.concatenate(list(curves.hit_rates.values())))):
        assert len(pixels) == len(values)
        scale = np.stack([values, np.ones(len(values))], 1)
        fitted = scale @ np.linalg.lstsq(scale, pixels, rcond=None)[0]
        assert np.allclose(fitted, pixels, atol=0.01)


# ---------------------------------------------------------------- what is in it


def test_every_point_of_every_policy_is_in_the_svg(tmp_path: Path) -> None:
    svg = svg_of(plain_curves(), tmp_path)
    policies_are_drawn(svg, plain_curves())
    lru, optimum = points_of(svg, "policy-0"), points_of(svg, "policy-3")
    assert np.all(np.diff(lru[:, 0]) > 100)
    assert np.all(np.diff(lru[:, 1]) < 0), "more hits are further up"
    assert np.ptp(lru[:, 1]) / np.ptp(optimum[:, 1]) == pytest.approx(0.39 / 0.3, rel=1e-4)


def test_long_curves_are_not_thinned_out(tmp_path: Path) -> None:
    sizes = np.arange(1, 2001)
    curves = made_curves({"lru": np.sqrt(sizes / 4000).tolist(), "arc": (sizes / 4000).tolist()}, sizes.tolist())
    policies_are_drawn(svg_of(curves, tmp_path), curves)


def test_svg_has_all_captions(tmp_path: Path) -> None:
    texts = texts_of(svg_of(plain_curves(), tmp_path))
    for wanted in (
        "Block hit rate of made",
        "7 requests, 100 block references; the working set is 50 blocks of 16 tokens",
        "knee of lru: 300 blocks, 35.0 %",
        "infinite cache: 43.8 %",
        "capacity (blocks)",
        "capacity (tokens)",
        "lru",
        "arc",
        "…amples/own_policy.py:Mine",
        "optimum",
    ):
        assert wanted in texts
    assert "at most 10.0 points, at 20 blocks" in " ".join(texts)
    assert "One request after another" in " ".join(texts)


def test_with_a_model_the_second_axis_is_in_gib(tmp_path: Path) -> None:
    texts = texts_of(svg_of(plain_curves(), tmp_path, bytes_per_block=2**30, model="Some <Model>"))
    assert "capacity (GiB of Some <Model>)" in texts
    assert texts.count("1k") == 3, "1000 blocks are 1000 GiB; both pairs of axes count blocks"
    texts = texts_of(svg_of(plain_curves(), tmp_path, bytes_per_block=2**20))
    assert "capacity (GiB)" in texts
    assert "0.01" in texts


def test_the_gap_runs_from_the_best_policy_to_the_optimum(tmp_path: Path) -> None:
    svg = svg_of(plain_curves(), tmp_path)
    corners = {tuple(point) for point in points_of(svg, "gap").round(2)}
    best = [("policy-1", 0), ("policy-1", 1), ("policy-0", 2), ("policy-0", 3)]
    wanted = [points_of(svg, group)[number] for group, number in best] + list(points_of(svg, "policy-3"))
    assert {tuple(point.round(2)) for point in wanted} <= corners


def test_without_an_optimum_nothing_is_shaded(tmp_path: Path) -> None:
    svg = svg_of(sampled_curves(), tmp_path)
    ids = {element.get("id") for element in svg.iter(f"{SVG}g")}
    assert "gap" not in ids
    assert {"policy-0", "policy-1", "infinite", "knee", "band-0"} <= ids
    assert "band-1" not in ids, "only lru has an error"
    assert gap_of(sampled_curves()) == ""


def test_band_is_two_standard_errors_and_explained(tmp_path: Path) -> None:
    svg = svg_of(sampled_curves(), tmp_path)
    band, lru = points_of(svg, "band-0"), points_of(svg, "policy-0")
    a_point = (lru[0, 1] - lru[1, 1]) / 19
    heights = {round(float((y - lru[1, 1]) / a_point), 2) for x, y in band if abs(x - lru[1, 0]) < 0.01}
    assert heights >= {-2.0, 2.0}
    said = " ".join(texts_of(svg))
    assert "Sampled: 1 block in 16." in said
    assert "The band of lru is two standard errors to each side." in said


def test_a_png_is_a_picture_of_the_same_figure(tmp_path: Path) -> None:
    from blockyard_lab.curve.picture import make_figure

    draw_curves(plain_curves(), tmp_path / "curves.PNG")
    pixels = matplotlib.image.imread(tmp_path / "curves.PNG", format="png")
    assert pixels.shape[1] == 1536
    assert 0.02 < np.mean(pixels[:, :, :3].min(axis=2) < 0.9) < 0.4, "some ink, on white"
    lines = make_figure(plain_curves(), 0, "", keep_all_letters=False).axes[0].get_lines()
    for number, rates in enumerate(plain_curves().hit_rates.values()):
        (line,) = [line for line in lines if line.get_gid() == f"policy-{number}"]
        assert np.array_equal(line.get_xydata(), np.stack([plain_curves().sizes, 100 * rates], 1))


# ---------------------------------------------------------------- awkward curves


@pytest.mark.parametrize("what", AWKWARD)
def test_curves_with_extreme_values_are_drawn(what: str, tmp_path: Path) -> None:
    curves = AWKWARD[what]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        svg = svg_of(curves, tmp_path, bytes_per_block=2**50, model=HOSTILE)
        draw_curves(curves, tmp_path / "curves.png")
    policies_are_drawn(svg, curves)
    said = " ".join(texts_of(svg))
    assert knee_of(curves) in said or sentence(knee_of(curves)) in said
    assert sum(text.startswith("Block hit rate of ") for text in texts_of(svg)) == 1


@pytest.mark.parametrize("what", AWKWARD)
def test_texts_do_not_overlap_or_leave_the_figure(what: str) -> None:
    from blockyard_lab.curve.picture import make_figure

    figure = make_figure(AWKWARD[what], 0, "", keep_all_letters=False)
    figure.canvas.draw()
    axes = figure.axes[0]
    low, high = axes.get_xlim()
    ticks = [tick.label1 for tick in axes.xaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    words = [text for text in [*figure.texts, *axes.texts, *ticks] if text.get_text()]
    boxes = [(text.get_text(), matplotlib.text.Text.get_window_extent(text)) for text in words]
    for number, (name, box) in enumerate(boxes):
        assert box.x0 >= 0, name
        assert box.y0 >= 0, name
        assert box.x1 <= figure.bbox.x1 + 1, name
        assert box.y1 <= figure.bbox.y1, name
        assert [other for other, around in boxes[:number] if box.overlaps(around)] == [], name


def test_knee_between_sizes_is_marked(tmp_path: Path) -> None:
    ids = {what: {element.get("id") for element in svg_of(AWKWARD[what], tmp_path).iter()} for what in AWKWARD}
    assert "knee" in ids["a knee between two sizes"]
    assert "knee" not in ids["a knee beyond the sizes"] | ids["forty policies"]
    assert "Knee of lru: 17 blocks, 30.0 %." in " ".join(texts_of(svg_of(AWKWARD["a knee beyond the sizes"], tmp_path)))


def test_no_line_crosses_the_knees_caption() -> None:
    from blockyard_lab.curve.picture import make_figure

    figure = make_figure(AWKWARD["every policy"], 0, "", keep_all_letters=False)
    figure.canvas.draw()
    axes = figure.axes[0]
    (words,) = [text for text in axes.texts if text.get_text().startswith("knee")]
    box = matplotlib.text.Text.get_window_extent(words)
    for line in axes.get_lines():
        path = line.get_transform().transform_path(line.get_path())
        assert not path.intersects_bbox(box, filled=False) or line.get_gid() == "knee", line.get_gid()


def test_a_second_pair_of_axes_shows_the_distance_from_lru(tmp_path: Path) -> None:
    svg = svg_of(plain_curves(), tmp_path)
    assert "points above lru" in texts_of(svg)
    arc, mine = points_of(svg, "above-1"), points_of(svg, "above-2")
    assert np.allclose(arc[:, 0], points_of(svg, "policy-1")[:, 0])
    heights = np.concatenate([arc[:, 1], mine[:, 1]])
    wanted = np.array([1.0, 7.5, -2.0, 0.0, -1.0, -2.5, -1.0, 0.0])
    assert np.allclose(np.polyval(np.polyfit(wanted, heights, 1), wanted), heights, atol=0.01)
    assert not [element for element in svg.iter() if element.get("id") in {"above-0", "above-3"}], "lru, the optimum"
    for what in ("one policy", "only the optimum", "forty policies", "one size"):
        assert "points above lru" not in texts_of(svg_of(AWKWARD[what], tmp_path))


def test_two_traces_share_a_picture(tmp_path: Path) -> None:
    both = combine_curves(two_traces())
    svg = svg_of(both, tmp_path)
    policies_are_drawn(svg, both)
    texts = texts_of(svg)
    assert {"lru A", "optimum A", "lru B", "optimum B"} <= set(texts)
    assert {"knee of lru A: 20 blocks, 12.5 %", "knee of lru B: 20 blocks, 25.0 %"} <= set(texts)
    assert {"infinite cache A: 45.0 %", "infinite cache B: 90.0 %"} <= set(texts)
    assert "A: monday.jsonl, 7 requests, 50 blocks; B: tuesday.jsonl, 7 requests, 50 blocks" in texts
    assert "points above lru" not in texts


def test_two_traces_have_one_colour_a_policy_and_dashes_of_their_own() -> None:
    styles = line_styles_of(combine_curves(two_traces()))
    assert styles == {"lru A": 0, "optimum A": -1, "lru B": len(COLORS), "optimum B": -2}


def test_incompatible_traces_are_refused() -> None:
    monday, tuesday = two_traces()
    with pytest.raises(InvalidArgument, match=r"monday\.jsonl has blocks of 16 tokens and tuesday\.jsonl of 512"):
        combine_curves([monday, replace(tuesday, tokens_a_block=512)])
    with pytest.raises(InvalidArgument, match="different sizes"):
        combine_curves([monday, replace(tuesday, sizes=tuesday.sizes + 1)])
    with pytest.raises(InvalidArgument, match="5 traces"):
        combine_curves([monday] * 5)
    assert combine_curves([monday]) is monday


def test_names_that_do_not_fit_go_into_a_box(tmp_path: Path) -> None:
    texts = texts_of(svg_of(AWKWARD["forty policies"], tmp_path))
    assert sum(text.endswith(":Policy") and not text.startswith("knee") for text in texts) == 40


# ---------------------------------------------------------------- the file


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_two_writes_are_equal_and_leave_nothing_else(suffix: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        draw_curves(plain_curves(), tmp_path / (name + suffix), bytes_per_block=4096, model="m")
    assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"one{suffix}", f"two{suffix}"]


def test_settings_of_matplotlib_neither_change_the_picture_nor_are_changed(tmp_path: Path) -> None:
    draw_curves(plain_curves(), tmp_path / "a.svg")
    with matplotlib.rc_context({"lines.linewidth": 9, "font.size": 30, "svg.hashsalt": "x", "axes.grid": True}):
        before = dict(matplotlib.rcParams)
        draw_curves(plain_curves(), tmp_path / "b.svg")
        assert dict(matplotlib.rcParams) == before
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(
    "name", ["curves.pdf", "curves", "missing/curves.svg", "folder.svg", "n" * 300 + ".png", "\0.svg"]
)
def test_unwritable_path_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(InvalidArgument, match="path is ") as caught:
        draw_curves(plain_curves(), tmp_path / name)
    assert repr(str(tmp_path / name)) in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.svg"]


def test_longest_possible_file_name_is_written(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 251 + ".svg")
    draw_curves(plain_curves(), path)
    assert path.stat().st_size > 1000


@pytest.mark.parametrize("options", [{"bytes_per_block": -1}, {"bytes_per_block": 2**51}, {"model": 3}])
def test_bad_arguments_are_named(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        draw_curves(plain_curves(), tmp_path / "a.svg", **options)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path) -> None:
    code = (
        "import sys\nsys.modules['matplotlib'] = None\n"
        "from blockyard.errors import MissingExtra\nfrom blockyard_lab.curve.drawing import draw_curves\n"
        "from tests.support.made_curves import plain_curves\n"
        "try:\n    draw_curves(plain_curves(), sys.argv[1])\nexcept MissingExtra as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.svg")],
        env=child_environment(), cwd=None, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "matplotlib" in done.stdout, done.stderr
    assert "blockyard[lab]" in done.stdout


# ---------------------------------------------------------------- places, styles and words


@given(st.lists(st.floats(-5, 105), max_size=12), st.floats(0.1, 20))
def test_labels_are_apart_and_near(wanted: list[float], spacing: float) -> None:
    wanted = sorted(wanted)
    places = spread_labels(wanted, spacing, 0.0, 100.0)
    if places is None:
        assert (len(wanted) - 1) * spacing > 100
        return
    assert len(places) == len(wanted)
    assert all(-1e-6 <= place <= 100 + 1e-6 for place in places)
    assert all(after - before >= spacing - 1e-6 for before, after in pairwise(places))
    if all(after - before >= spacing for before, after in pairwise(wanted)) and all(0 <= w <= 100 for w in wanted):
        assert places == pytest.approx(wanted), "nothing moves that had room"


def test_overlapping_labels_spread_around_their_mean() -> None:
    assert spread_labels([50, 50, 50], 10, 0, 100) == pytest.approx([40, 50, 60])
    assert spread_labels([50, 58], 10, 0, 100) == pytest.approx([49, 59])
    assert spread_labels([100, 100], 10, 0, 100) == pytest.approx([90, 100])
    assert spread_labels([1, 2, 3], 60, 0, 100) is None
    assert spread_labels([], 10, 0, 100) == []


def test_a_policy_looks_the_same_in_every_picture() -> None:
    names = ["mine.py:A", "arc", "optimum", "lru", "mine.py:B"]
    styles = line_styles(names)
    assert styles["optimum"] == -1
    assert len(set(styles.values())) == len(names)
    assert {name: line_styles([name])[name] for name in ("arc", "lru")} == {"arc": styles["arc"], "lru": styles["lru"]}


def test_the_policies_that_ship_have_colours_of_their_own() -> None:
    styles = line_styles([*POLICIES, "optimum", "mine.py:A"])
    assert sorted(styles[policy] for policy in POLICIES) == list(range(len(COLORS)))
    assert styles["mine.py:A"] == len(COLORS), "the first one with dashes"


def test_numbers_and_names_are_formatted() -> None:
    assert [compact(number) for number in (0.01, 1, 20, 1000, 50_000, 10**6, 10**9, 10**14)] == [
        "0.01", "1", "20", "1k", "50k", "1M", "1G", "100T",
    ]  # fmt: skip
    assert keep_end("examples/own_policy.py:Mine", 10) == "…y.py:Mine"
    assert keep_end("lru", 3) == "lru"
    assert printable("a\n b\x00\udcffü对") == "a b??ü对"
    assert subtitle_of(made_curves({"lru": [0]}, [1], num_requests=1, num_references=1)).startswith(
        "1 request, 1 block reference;"
    )
    assert "reaches the optimum" in gap_of(AWKWARD["nothing hits"])
