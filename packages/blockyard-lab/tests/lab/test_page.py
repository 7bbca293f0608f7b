"""The page of hit-rate curves: its numbers, hostile names, and that it loads nothing from elsewhere."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from blockyard.errors import InvalidArgument
from blockyard_lab import output_file
from blockyard_lab.curve import HitCurves, combine_curves
from blockyard_lab.curve.captions import knee_of
from blockyard_lab.curve.curve_page import write_page
from blockyard_lab.curve.side_by_side import COLORS
from blockyard_lab.printing import printable

from ..support.lab_page import Page
from ..support.made_curves import HOSTILE, awkward_curves, made_curves, plain_curves, sampled_curves, two_traces

AWKWARD = awkward_curves()
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def written(curves: HitCurves, folder: Path, **options: Any) -> Page:
    path = folder / "curves.html"
    write_page(curves, path, **options)
    return Page(path.read_text(encoding="utf-8"))


# ---------------------------------------------------------------- what is in it


@pytest.mark.parametrize("what", AWKWARD)
def test_every_number_is_in_the_data_and_in_the_table(what: str, tmp_path: Path) -> None:
    curves = AWKWARD[what]
    page = written(curves, tmp_path)
    assert page.data["sizes"] == curves.sizes.tolist()
    assert [policy["rates"] for policy in page.data["policies"]] == [r.tolist() for r in curves.hit_rates.values()]
    assert [policy["name"] for policy in page.data["policies"]] == [printable(name) for name in curves.hit_rates]
    for number, row in enumerate(page.table()):
        size = int(curves.sizes[number])
        rates = [f"{100 * rates[number]:.3f}" for rates in curves.hit_rates.values()]
        assert row == [f"{size:,}", f"{size * 16:,}", *rates]


def test_page_has_all_captions(tmp_path: Path) -> None:
    page = written(plain_curves(), tmp_path)
    assert page.texts["title"] == page.texts["h1"] == ["Block hit rate of made"]
    said = " ".join(page.texts["p"] + page.texts["strong"])
    for wanted in (
        "Knee of lru: 300 blocks, 35.0 %.",
        "Infinite cache: 43.8 %.",
        "One request after another",
        "Shaded:",
    ):
        assert wanted in said
    (knee,) = page.data["knees"]
    assert knee == {
        "policy": "lru", "blocks": 300, "hit_rate": 0.35, "line": 0, "is_drawn": True, "words": knee_of(plain_curves()),
    }  # fmt: skip
    assert page.data["infinite"] == [{"rate": 0.4375, "words": "infinite cache: 43.8 %"}]


def test_two_traces_share_a_page(tmp_path: Path) -> None:
    page = written(combine_curves(two_traces()), tmp_path)
    assert page.texts["title"] == ["Block hit rate of 2 traces"]
    assert [policy["name"] for policy in page.data["policies"]] == ["lru A", "optimum A", "lru B", "optimum B"]
    assert [policy["is_optimum"] for policy in page.data["policies"]] == [False, True, False, True]
    assert [knee["line"] for knee in page.data["knees"]] == [0, 2]
    assert page.table()[1] == ["20", "320", "12.500", "30.000", "25.000", "60.000"]
    said = " ".join(page.texts["p"] + page.texts["strong"])
    assert "Knee of lru B: 20 blocks, 25.0 %." in said
    assert "B: tuesday.jsonl, 7 requests, 50 blocks" in said


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_two_traces_are_shown_in_a_browser(tmp_path: Path) -> None:
    start = seen_in_browser(combine_curves(two_traces()), tmp_path)["start"]
    assert len(start["lines"]) == 4
    assert {"knee of lru A: 20 blocks, 12.5 %", "knee of lru B: 20 blocks, 25.0 %"} <= set(start["words"])
    assert {"infinite cache A: 45.0 %", "infinite cache B: 90.0 %"} <= set(start["words"])
    assert not start["views"]


def test_a_model_adds_gib(tmp_path: Path) -> None:
    page = written(plain_curves(), tmp_path, bytes_per_block=3 * 2**29, model="A <b>Model</b>")
    assert [row[2] for row in page.table()] == ["1.5", "30", "450", "6,000"]
    assert "GiB of A <b>Model</b>" in page.texts["th"]
    assert page.data["second_factor"] == 1.5
    assert page.data["bytes_per_block"] == 3 * 2**29
    assert "GiB" not in " ".join(written(plain_curves(), tmp_path).texts["th"])


def test_the_page_has_every_colour_on_light_and_on_dark_paper() -> None:
    """The script uses `--c0` to `--cN`, one per entry of `COLORS`; the light scheme has the colours of the pictures."""
    css = (Path(output_file.__file__).parent / "pages" / "page.css").read_text()
    schemes = re.findall(r":root \{([^}]*)\}", css)
    assert len(schemes) == 2
    for scheme in schemes:
        found = {int(number): color for number, color in re.findall(r"--c(\d+): (#\w{6});", scheme)}
        assert sorted(found) == list(range(len(COLORS)))
        assert len(set(found.values())) == len(COLORS)
    assert [color.upper() for color in re.findall(r"--c\d+: (#\w{6});", schemes[0])] == list(COLORS)
    scripts = [path.read_text() for path in (Path(output_file.__file__).parent / "pages").glob("*.js")]
    asked = {int(number) for text in scripts for number in re.findall(r"var\(--c(\d+)\)", text)}
    assert asked <= set(range(len(COLORS)))


def _perceived(color: str) -> tuple[float, float, float]:
    """A colour in OKLab, in which equal distances look equally large."""
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    long = (0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue) ** (1 / 3)
    middle = (0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue) ** (1 / 3)
    short = (0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue) ** (1 / 3)
    return (
        0.2104542553 * long + 0.793617785 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.428592205 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.808675766 * short,
    )


def test_no_two_colours_of_lines_look_alike() -> None:
    css = (Path(output_file.__file__).parent / "pages" / "page.css").read_text()
    colors = re.findall(r"--c\d+: (#\w{6});", css)
    schemes = [colors[: len(COLORS)], colors[len(COLORS) :]]
    for scheme in schemes:
        pairs = itertools.combinations(map(_perceived, scheme), 2)
        assert min(math.dist(one, other) for one, other in pairs) > 0.13


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_every_policys_line_is_seen(tmp_path: Path) -> None:
    """A line in a colour that the style does not define would be invisible."""
    start = seen_in_browser(AWKWARD["every policy"], tmp_path)["start"]
    assert len(start["colors"]) == len(AWKWARD["every policy"].hit_rates)
    assert all(color.startswith("rgb(") for color in start["colors"]), start["colors"]


def test_errors_of_a_sample_are_in_the_data(tmp_path: Path) -> None:
    page = written(sampled_curves(), tmp_path)
    assert [policy["error"] for policy in page.data["policies"]] == [[0.005, 0.01], None]
    assert "Sampled: 1 block in 16." in " ".join(page.texts["p"])


# ---------------------------------------------------------------- a page of its own


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    """The page has the same tags whatever the names are."""
    hostile = written(AWKWARD["hostile names"], tmp_path, bytes_per_block=1, model=HOSTILE)
    plain = written(
        made_curves({"a": [0.1, 0.2], "optimum": [0.3, 0.4]}, [1, 9]), tmp_path, bytes_per_block=1, model="m"
    )
    assert hostile.tags == plain.tags
    assert hostile.texts["title"] == ["Block hit rate of " + printable(HOSTILE * 5)]
    assert f"{printable(HOSTILE)} (%)" in hostile.texts["th"]
    assert hostile.texts["script"][1] == plain.texts["script"][1]
    assert "<" not in hostile.texts["script"][0]


def test_nothing_is_loaded_from_anywhere(tmp_path: Path) -> None:
    page = written(plain_curves(), tmp_path)
    text = (tmp_path / "curves.html").read_text(encoding="utf-8")
    assert set(re.findall(r"\w+://[^\s\"')]+", text)) == {"http://www.w3.org/2000/svg"}, "the name of SVG in the script"
    assert not [tag for tag in page.tags if {"src", "href", "srcset", "data"} & set(tag[1])]
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", text)
    assert ("meta", "default-src 'none'") in [
        (tag, (attributes.get("content") or "").partition(";")[0]) for tag, attributes in page.tags
    ]
    assert "{{" not in text


def test_without_a_script_only_the_empty_picture_is_hidden(tmp_path: Path) -> None:
    page = written(plain_curves(), tmp_path)
    assert [(tag, attributes.get("id")) for tag, attributes in page.tags if "hidden" in attributes] == [
        ("section", "picture")
    ]


# ---------------------------------------------------------------- the file


def test_two_writes_are_equal_and_leave_nothing_else(tmp_path: Path) -> None:
    for name in ("a.html", "b.HTML"):
        write_page(plain_curves(), tmp_path / name, model="m", bytes_per_block=7)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.HTML").read_bytes()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "name", ["curves.htm", "curves", "missing/a.html", "folder.html", "n" * 300 + ".html", "\0.html"]
)
def test_unwritable_path_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(InvalidArgument, match="path is ") as caught:
        write_page(plain_curves(), tmp_path / name)
    assert repr(str(tmp_path / name)) in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.html"]


@pytest.mark.parametrize("options", [{"bytes_per_block": -1}, {"bytes_per_block": 2**51}, {"model": None}])
def test_bad_arguments_are_named(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        write_page(plain_curves(), tmp_path / "a.html", **options)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- in a browser

#: Told to the page in turn; what it then shows is read before the next.
ACTIONS = {
    "start": "",
    "left": "key('ArrowLeft')",
    "end": "key('End')",
    "past the end": "key('ArrowRight')",
    "home": "key('Home')",
    "pointed": "point(0.99)",
    "optimum off": "buttons[3].click()",
    "linear": "document.getElementById('linear').click()",
    "pointed in the middle": "point(0.5)",
    "optimum on": "buttons[3].click()",
    "above lru": "document.getElementById('points').click()",
    "hit rates": "document.getElementById('rates').click()",
}
DRIVER = """
<script>(async () => {
  const chart = document.getElementById("chart"), buttons = document.querySelectorAll("#readout button");
  const key = (name) => chart.firstChild.dispatchEvent(new KeyboardEvent("keydown", { key: name }));
  const point = (part) => {
    const box = chart.firstChild.getBoundingClientRect();
    chart.firstChild.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + part * box.width }));
  };
  const text = (found) => [...found].map((one) => one.textContent);
  const seen = {};
  const look = (name) => seen[name] = {
    spoken: chart.firstChild.getAttribute("aria-valuetext"), place: text(document.getElementById("place").childNodes),
    rates: text(document.querySelectorAll("#readout tbody td:nth-child(2)")),
    gaps: text(document.querySelectorAll("#readout tbody td:nth-child(3)")),
    lines: [...document.querySelectorAll("#chart polyline")].map((line) => line.getAttribute("points")),
    colors: [...document.querySelectorAll("#chart polyline")].map((line) => getComputedStyle(line).stroke),
    names: text(buttons), words: text(document.querySelectorAll("#chart text")),
    wide: document.documentElement.scrollWidth > innerWidth,
    boxes: [...document.querySelectorAll("#chart text")].map((one) => [one.textContent, one.getBBox()]).map(
      ([words, box]) => [words, box.x, box.y, box.x + box.width, box.y + box.height]),
    chart: document.querySelector("#chart svg").clientWidth,
    views: !document.getElementById("views").hidden,
    sticks: getComputedStyle(document.querySelector(".numbers tbody th")).position,
  };
  ACTIONS
  document.body.textContent = JSON.stringify(seen);
})();</script>
"""


def seen_in_browser(
    curves: HitCurves, folder: Path, window: str = "1000,800", **options: Any
) -> dict[str, dict[str, Any]]:
    path = folder / "curves.html"
    write_page(curves, path, **options)
    steps = "\n".join(f"{action}; look({json.dumps(name)});" for name, action in ACTIONS.items())
    path.write_text(path.read_text(encoding="utf-8") + DRIVER.replace("ACTIONS", steps), encoding="utf-8")
    done = subprocess.run(
        [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={window}",
            f"--user-data-dir={folder / 'profile'}", "--dump-dom", path.as_uri(),
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    body = Page(done.stdout).texts["body"][0]
    found: dict[str, dict[str, Any]] = json.loads(body)
    return found


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_crosshair_axis_and_names_work(tmp_path: Path) -> None:
    seen = seen_in_browser(plain_curves(), tmp_path, bytes_per_block=2**29)
    start = seen["start"]
    assert start["place"] == ["300 blocks", "4,800 tokens · 150 GiB"], "at the knee"
    assert start["rates"] == ["35.0 %", "33.0 %", "34.0 %", "40.0 %"]
    assert start["gaps"] == ["5.0", "7.0", "6.0", ""]
    assert start["names"] == ["lru", "arc", "examples/own_policy.py:Mine", "optimum"]
    assert "knee of lru: 300 blocks, 35.0 %" in start["words"]
    assert (
        seen["left"]["spoken"]
        == "20 blocks: lru 12.5 %, arc 20.0 %, examples/own_policy.py:Mine 10.0 %, optimum 30.0 %"
    )
    assert seen["end"]["place"] == seen["past the end"]["place"] == seen["pointed"]["place"]
    assert seen["end"]["place"][0] == "4,000 blocks"
    assert seen["home"]["place"] == ["1 block", "16 tokens · 0.5 GiB"]
    assert len(start["lines"]) == len(seen["optimum on"]["lines"]) == 4
    assert seen["optimum off"]["lines"] == start["lines"][:3]
    assert seen["pointed in the middle"]["spoken"].startswith("300 blocks"), "on a linear axis nearer than 4,000"
    assert not start["wide"]
    assert start["sticks"] == "sticky", "the capacities of the table, while its columns are scrolled"


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_page_shows_points_above_lru(tmp_path: Path) -> None:
    seen = seen_in_browser(plain_curves(), tmp_path)
    lines = [[float(point.split(",")[1]) for point in line.split()] for line in seen["above lru"]["lines"]]
    assert len(lines) == 3, "without the optimum"
    assert len(set(lines[0])) == 1, "lru is flat"
    points = [1.0, 7.5, -2.0, 0.0]
    assert [(lines[0][0] - y) / (lines[0][0] - lines[1][1]) * 7.5 for y in lines[1]] == pytest.approx(points, abs=0.05)
    assert any(words.startswith("+") for words in seen["above lru"]["words"])
    assert seen["hit rates"]["lines"] == seen["optimum on"]["lines"]
    assert seen["start"]["views"]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
@pytest.mark.parametrize("window", ["1900,1000", "500,800"])
def test_texts_in_the_chart_do_not_overlap(window: str, tmp_path: Path) -> None:
    start = seen_in_browser(AWKWARD["every policy"], tmp_path, window, bytes_per_block=2**20)["start"]
    for number, (words, left, top, right, bottom) in enumerate(start["boxes"]):
        assert left >= 0, words
        assert right <= start["chart"], words
        for other, x0, y0, x1, y1 in start["boxes"][:number]:
            assert right <= x0 or x1 <= left or bottom <= y0 or y1 <= top, (words, other)
    assert any(words.startswith("knee") for words in start["words"])
    assert sum(words.endswith(("k", "M", "G", "1", "2", "3", "5", "0")) for words in start["words"]) >= 6
    assert start["chart"] > (1300 if window.startswith("1900") else 400)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_lines_are_drawn_where_the_numbers_are(tmp_path: Path) -> None:
    seen = seen_in_browser(plain_curves(), tmp_path)
    for state in ("start", "linear"):
        lru = [tuple(map(float, point.split(","))) for point in seen[state]["lines"][0].split()]
        (x0, y0), (x1, y1), (x2, y2), (x3, y3) = lru
        across = [0.0, 0.3612, 0.6877, 1.0] if state == "start" else [0.0, 19 / 3999, 299 / 3999, 1.0]
        assert [(x - x0) / (x3 - x0) for x in (x0, x1, x2, x3)] == pytest.approx(across, abs=1e-3)
        assert [(y0 - y) / (y0 - y3) for y in (y1, y2)] == pytest.approx([0.115 / 0.39, 0.34 / 0.39], abs=1e-3)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_hostile_names_are_shown_as_they_are(tmp_path: Path) -> None:
    rates = {HOSTILE: [0.0, 0.0], "a": [0.0, 0.0], "b": [0.0, 0.0], "optimum": [0.0, 0.0]}
    seen = seen_in_browser(
        made_curves(rates, [1, 10**8], trace=HOSTILE), tmp_path, model=HOSTILE, bytes_per_block=2**50
    )
    assert seen["start"]["names"][0] == printable(HOSTILE)
    assert not any("NaN" in line for state in seen.values() for line in state["lines"])
    assert seen["end"]["place"][0] == "100,000,000 blocks"
