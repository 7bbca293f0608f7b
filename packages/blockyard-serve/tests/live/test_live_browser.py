"""The page of a real server under load in a headless browser: each block is shown as the cache reports it."""

from __future__ import annotations

import base64
import json
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

from blockyard import KVCacheManager
from blockyard.tenants import Tenant
from blockyard_engine import SamplingParams
from blockyard_serve.live import feed as feeds
from blockyard_serve.live.call_queue import EngineStatus
from blockyard_serve.live.snapshot import Snapshot, take_snapshot
from blockyard_testing.browser import CHROMIUM, Browser, asking, browser
from blockyard_testing.live_caches import state_of
from blockyard_testing.patience import wait_until
from blockyard_testing.servers import MODEL, Running, running_server, tiny_engine

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")

HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> \u202eright to left\u202c "
    "\x00\x07\x1b[31m \u200bhidden\u200b </textarea></style>&lt;b&gt; \U0001f600"
)
FRAMES = """JSON.stringify(blockyard.frames.list.map((frame) => ({
  at: frame.at, step: frame.step, totals: frame.totals, cells: [...frame.map.cells],
  rows: [...frame.rows.values()].map(({ holder, path, tokens, computed }) => ({ holder, path, tokens, computed })),
})))"""
#: Of these states, those that some cell had in some frame.
SEEN = """(async () => {
  const { NAMES } = await import("./states.js"), wanted = ["free", "idle", "shared", "private"];
  const seen = new Set(blockyard.frames.list.flatMap(({ map }) => [...map.cells].map((cell) => NAMES[cell & 7])));
  return wanted.every((name) => seen.has(name));
})()"""
SHOWN = "document.getElementById('map-cell').textContent"


class Truth:
    """Records the result of `cache.block` for every block at the moment of each snapshot."""

    def __init__(self) -> None:
        self.moments: dict[float, dict[str, Any]] = {}

    def take(self, cache: KVCacheManager, around: EngineStatus) -> Snapshot:
        """In the place of `take_snapshot`: in the engine's thread, between two steps."""
        blocks = range(1, cache.pool.num_blocks)
        rows = {
            holder: [block - 1 for block in cache.block_ids(seq).tolist()] for seq, holder in cache.running().items()
        }
        told = {
            "states": [state_of(cache, block) for block in blocks],
            "counts": [cache.block(block).ref_cnt for block in blocks],
            "rows": rows,
            "used": cache.num_used_blocks,
            "hit": cache.stats().num_hit_tokens,
        }
        snapshot = take_snapshot(cache, around)
        self.moments[round(snapshot.taken_at, 3)] = told
        return snapshot


def load(server: Running, num_clients: int = 3) -> AbstractContextManager[None]:
    """Run clients whose prompts share prefixes until the block is left, for a minute at most."""

    def ask(number: int, stop: threading.Event) -> None:
        until = time.monotonic() + 60
        turn = 0
        while not stop.is_set() and time.monotonic() < until:
            turn += 1
            prompt = f"{'shared beginning ' * (2 + turn % 3)}{number} {turn}"
            server.post("/v1/completions", prompt=prompt, max_tokens=12, temperature=0, n=1 + turn % 2)

    return asking(ask, num_clients, timeout=60)


def open_page(page: Browser, server: Running, num_frames: int = 1, **options: Any) -> None:
    page.open(f"{server.address}/ui/", **options)
    page.wait(f"globalThis.blockyard && blockyard.frames.list.length >= {num_frames}")


def require_quiet(page: Browser, server: Running) -> None:
    """Check that there was no error or warning, and no request to any other server."""
    assert page.complaints == []
    assert {address for address in page.requested if not address.startswith(server.address)} <= {"about:blank"}


def test_page_shows_the_state_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    truth = Truth()
    monkeypatch.setattr(feeds, "take_snapshot", truth.take)
    with running_server(tiny_engine(num_blocks=60, max_num_seqs=4)) as server, browser(tmp_path) as page:
        with load(server):
            open_page(page, server, 25)
            page.wait(SEEN)
            page.evaluate("document.getElementById('pause').click()")
        frames = json.loads(page.evaluate(FRAMES))
        shown = page.evaluate("blockyard.frames.shown.at")
        names = page.evaluate("import('./states.js').then((found) => found.NAMES)")
        seen = set()
        for frame in frames:
            told = truth.moments[frame["at"]]
            assert [names[cell & 7] for cell in frame["cells"]] == told["states"]
            assert [cell >> 3 for cell in frame["cells"]] == told["counts"]
            assert {row["holder"]: row["path"] for row in frame["rows"]} == told["rows"]
            totals = frame["totals"]
            assert totals["private"] + totals["shared"] + totals["pending"] == told["used"]
            assert totals["hit"] == told["hit"]
            seen |= set(told["states"])
        assert seen >= {"free", "idle", "shared", "private"}
        # The frame that is held, cell after cell, as a keyboard and a screen reader find it.
        told = truth.moments[shown]
        page.evaluate("document.getElementById('map').focus()")
        for number, (state, count) in enumerate(zip(told["states"], told["counts"], strict=True), 1):
            page.press("ArrowRight")
            words = page.evaluate(SHOWN)
            assert words.startswith(f"Block {number}: {state}")
            assert ("holder" in words) == (count > 0)
        require_quiet(page, server)


#: Pixels of the chart of the pool that are drawn in the middle of its gap, and of what lies before it.
DRAWN = """(() => {
  const { chart } = blockyard, canvas = chart.canvas, [before, after] = chart.spans;
  const ends = [before[0].at, before.at(-1).at, after[0].at], wide = canvas.clientWidth, scale = canvas.width / wide;
  const x = (at) => (wide - 6 - ((chart.frame.at - at) / 120) * (wide - 46)) * scale;
  const drawn = (at) => {
    const column = canvas.getContext("2d").getImageData(Math.round(x(at)), 8 * scale, 1, 74 * scale).data;
    return column.filter((value, place) => place % 4 === 3 && value > 0).length;
  };
  return [drawn((ends[0] + ends[1]) / 2), drawn((ends[1] + ends[2]) / 2)];
})()"""
GROWN = "blockyard.chart.grown((totals) => totals.prompt)"


def test_unwatched_time_is_not_drawn(tmp_path: Path) -> None:
    with running_server(tiny_engine(num_blocks=60, max_num_seqs=4)) as server, browser(tmp_path) as page:
        with load(server):
            open_page(page, server, 10)
            page.wait("blockyard.chart.points.at(-1).at - blockyard.chart.points[0].at > 4")
            watched = page.evaluate("blockyard.chart.points.at(-1).at - blockyard.chart.points[0].at")
            page.send("Page.navigate", url="about:blank")
            page.wait("location.href === 'about:blank'")
        time.sleep(1)  # until the server notices that the reader has left, which it may see at its next frame only
        server.require_idle()
        unseen = 400
        for _ in range(4):
            assert server.post("/v1/completions", prompt="u" * (unseen // 4), max_tokens=1)[0] == 200
        time.sleep(max(3, watched / 2))  # so that the gap is some pixels wide, however slow the machine
        open_page(page, server)
        page.wait("blockyard.chart.spans?.length === 2")
        before = page.evaluate(GROWN)
        server.post("/v1/completions", prompt="seen", max_tokens=2)
        page.wait(f"{GROWN} > {before}")
        assert page.evaluate(GROWN) == before + len("seen")
        whole = page.evaluate("((all) => all.at(-1).totals.prompt - all[0].totals.prompt)(blockyard.chart.points)")
        assert whole >= page.evaluate(GROWN) + unseen
        words = page.evaluate("document.getElementById('time-words').textContent")
        assert "No page was open for" in words
        require_quiet(page, server)
        shown, hidden = page.evaluate(DRAWN)
        assert shown > 20
        assert hidden <= 3  # the lines of the axis


def test_colours_of_the_cells_are_those_of_the_states(tmp_path: Path) -> None:
    """A pixel of each cell, left of its middle and near its lower edge, beside the legend's drawing of the state."""
    pixels = """(async () => {
      const { drawCell, NAMES } = await import("./states.js");
      const map = blockyard.map, { columns, pitch, gap, gutter } = map.layout(), size = pitch - gap;
      const at = (canvas, x, y) => [...canvas.getContext("2d").getImageData(x, y, 1, 1).data].join();
      const found = [];
      for (let cell = 0; cell < map.numCells; cell++) {
        const x = gutter + (cell % columns) * pitch, y = 3 + Math.floor(cell / columns) * pitch;
        const { state, count } = map.one(cell), small = document.createElement("canvas");
        drawCell(small.getContext("2d"), 0, 0, size, state, count);
        const [dx, dy] = [Math.floor(size / 2), Math.floor(size / 2)];
        found.push([NAMES[state], at(map.canvas, x + dx, y + dy), at(small, dx, dy)]);
      }
      return found;
    })()"""
    with running_server(tiny_engine(num_blocks=60, max_num_seqs=4)) as server, browser(tmp_path) as page:
        with load(server):
            open_page(page, server, 10)
            page.wait("""(() => {
              const map = blockyard.map, cells = Array.from({ length: map.numCells }, (_, cell) => map.one(cell).state);
              return new Set(cells).size >= 3 && (document.getElementById('pause').click(), true);
            })()""")
        # What has just changed is framed for a while.
        wait_until(lambda: all(drawn == wanted for _, drawn, wanted in page.evaluate(pixels)))
        found = page.evaluate(pixels)
        assert len(found) == 59
        for state, drawn, wanted in found:
            assert drawn == wanted, state
        colors = {state: {drawn for name, drawn, _ in found if name == state} for state, _, _ in found}
        assert len(colors) >= 3
        assert len(set().union(*colors.values())) >= len(colors)


def test_hostile_prompts_are_text(tmp_path: Path) -> None:
    with running_server(tiny_engine(num_blocks=100)) as server, browser(tmp_path) as page:
        for _ in range(2):
            assert server.post("/v1/completions", prompt=HOSTILE, max_tokens=1)[0] == 200
        open_page(page, server)
        page.wait("document.querySelectorAll('#tree button').length > 0")
        text = page.evaluate("document.querySelector('#tree .text').textContent")
        assert "<script>document.title" in text
        blocks = page.evaluate("(async () => (await (await fetch('state/branch/0')).json()).blocks)()")
        said = ""
        for block in blocks:
            page.evaluate(f"blockyard.map.isKept = true; blockyard.map.moveTo({block - 1})")
            page.wait(f"blockyard.inspector.detail?.id === {block}")
            said += page.evaluate("[...document.querySelectorAll('.tokens li')].map((one) => one.textContent).join('')")
        for wanted in ("<script>document.title='owned'</script>", "onerror=", "\u2400\u2407\u241b[31m", "</textarea>"):
            assert wanted in said
        assert "\u202e" not in said
        assert page.evaluate("document.title") == "tiny: blocks"
        assert page.evaluate("document.querySelectorAll('main script, main img, main b i script').length") == 0
        assert page.evaluate("import('./text.js').then((found) => found.visible('a\\u202eb\\u200bc\\u0000'))") == (
            "a\u27e8U+202E\u27e9b\u27e8U+200B\u27e9c\u2400"
        )
        # The chat box too: what was typed, and an X-Request-ID and a model's name cannot be otherwise.
        page.evaluate("document.getElementById('question').focus()")
        page.write(HOSTILE.replace("\x00", "").replace("\x07", "").replace("\x1b", ""))
        page.press("Enter")
        page.wait("!!document.querySelector('.used, .turn.error')")
        turn = page.evaluate("document.querySelector('.turn.user').textContent")
        assert turn.startswith("<script>document.title='owned'</script><img src=x")
        assert page.evaluate("document.querySelector('.turn.user').children.length") == 0
        assert page.evaluate("document.title") == "tiny: blocks"
        require_quiet(page, server)


def test_a_chat_takes_blocks_and_hits(tmp_path: Path) -> None:
    # A token of this model is any byte: as text, and read again, an answer of n tokens is one of up to 3 n.
    engine = tiny_engine(num_blocks=200, max_position_embeddings=2048)
    with running_server(engine) as server, browser(tmp_path) as page:
        open_page(page, server)
        for turn in range(2):
            page.evaluate("document.getElementById('question').focus()")
            page.write("Say something about paging, please, and say it twice.")
            page.press("Enter")
            page.wait(f"document.querySelectorAll('.used, .turn.error').length === {turn + 1}")
        assert page.evaluate("[...document.querySelectorAll('.turn.error')].map((one) => one.textContent)") == []
        used = page.evaluate("[...document.querySelectorAll('.used')].map((one) => one.textContent)")
        assert used[0].startswith("0 of ")
        assert not used[1].startswith("0 of "), "the second turn repeats the first, which is cached"
        assert page.evaluate(
            "blockyard.frames.list.some(({ rows }) => [...rows.values()].some(({ name }) => name.startsWith('page-')))"
        )
        require_quiet(page, server)


def test_page_asks_for_the_key_and_sends_it_only_in_a_header(tmp_path: Path) -> None:
    with running_server(tiny_engine(num_blocks=40), api_key="open-sesame") as server, browser(tmp_path) as page:
        page.open(f"{server.address}/ui/")
        page.wait("!document.getElementById('key-form').hidden")
        assert page.evaluate("document.activeElement.id") == "key"
        assert page.evaluate("document.querySelector('main').hidden")
        page.write("open-sesame")
        page.press("Enter")
        page.wait("globalThis.blockyard.frames.list.length > 0")
        assert not page.evaluate("document.querySelector('main').hidden")
        assert not [address for address in page.requested if "sesame" in address]
        assert [one for one in page.complaints if "401" not in one] == []


def test_playback_steps_through_moments(tmp_path: Path) -> None:
    with running_server(tiny_engine(num_blocks=60, max_num_seqs=4)) as server, browser(tmp_path) as page:
        with load(server):
            open_page(page, server, 12)
            page.evaluate("document.getElementById('map').focus()")
            page.press("p")
            held = page.evaluate("blockyard.frames.shown.n")
            page.wait(f"blockyard.frames.latest.n > {held} + 3")
            numbers = page.evaluate("blockyard.frames.list.map(({ n }) => n)")  # a page that is slow misses some
            place = numbers.index(held)
            assert page.evaluate("blockyard.frames.shown.n") == held
            assert page.evaluate("document.getElementById('status').textContent") == "paused"
            page.press(",", 2)
            assert page.evaluate("blockyard.frames.shown.n") == numbers[place - 2]
            page.press(".", 3)
            assert page.evaluate("blockyard.frames.shown.n") == numbers[place + 1]
            assert page.evaluate("document.getElementById('said').textContent").startswith("Step ")
            page.press("p")
            page.wait("blockyard.frames.shown === blockyard.frames.latest")
            page.evaluate("""(() => { const speed = document.getElementById("speed"); speed.value = "0.125";
              speed.dispatchEvent(new Event("change")); })()""")
            page.wait("blockyard.frames.list.length - blockyard.frames.place > 4")
        require_quiet(page, server)


@pytest.mark.parametrize("width", [390, 1280])
def test_page_fits_and_every_control_is_reached_by_tab(width: int, tmp_path: Path) -> None:
    with running_server(tiny_engine(num_blocks=60, max_num_seqs=4)) as server, browser(tmp_path) as page:
        with load(server):
            open_page(page, server, 5, width=width, height=844)
            page.evaluate("document.getElementById('pause').click(); document.activeElement.blur()")
            page.wait("document.querySelectorAll('#tree button').length > 0")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        reached, outlines = [], []
        for _ in range(60):
            page.press("Tab")
            told = page.evaluate("""(() => { const one = document.activeElement, style = getComputedStyle(one);
              const isSeen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1;
              return [one.id || one.closest("ul")?.id || one.tagName, isSeen]; })()""")
            if told[0] == "BODY":
                break
            reached.append(told[0])
            outlines.append(told[1])
        wanted = {"back", "pause", "speed", "map", "scrub", "question", "send", "forget", "tree"}
        assert wanted <= set(reached)
        assert all(outlines), list(zip(reached, outlines, strict=True))
        small = page.evaluate("""[...document.querySelectorAll("button, select, input, textarea")]
          .filter((one) => one.offsetParent && one.getBoundingClientRect().height < 22)
          .map((one) => one.id || one.className)""")
        assert small == []
        require_quiet(page, server)


def test_each_completion_has_its_own_named_row(tmp_path: Path) -> None:
    body = json.dumps({"model": MODEL, "prompt": "three answers", "max_tokens": 80, "n": 3}).encode()

    def ask(_: int, stop: threading.Event) -> None:
        until = time.monotonic() + 60
        while not stop.is_set() and time.monotonic() < until:
            assert server.call("POST", "/v1/completions", body, {"X-Request-ID": "mine"})[0] == 200

    with running_server(tiny_engine(num_blocks=60, max_num_seqs=4)) as server, browser(tmp_path) as page:
        open_page(page, server)
        with asking(ask, 1, timeout=60):
            page.wait("document.querySelectorAll('#rows .who').length === 3")
            page.wait("""(() => {
              const shown = (kind) => [...document.querySelectorAll(`#rows .who ${kind}`)].map((e) => e.textContent);
              const holders = shown("b"), names = shown("i"), ends = ["", ", completion 1", ", completion 2"];
              return ends.every((end, at) => holders[at] === `${holders[0]}${end}` && names[at] === `mine${end}`);
            })()""")
            assert page.evaluate("""[...document.querySelectorAll('#rows .who')].every((row) =>
              row.querySelector('em').getBoundingClientRect().right <= row.getBoundingClientRect().right)""")
        require_quiet(page, server)


def test_cells_of_a_large_pool_show_fractions_and_can_be_opened(tmp_path: Path) -> None:
    with running_server(tiny_engine(num_blocks=9000)) as server, browser(tmp_path) as page:
        server.post("/v1/completions", prompt="y" * 400, max_tokens=1)
        open_page(page, server)
        assert page.evaluate("blockyard.frames.shown.map.scale") == 5
        page.evaluate("document.getElementById('map').focus()")
        page.press("ArrowRight")
        page.press("Enter")
        assert page.evaluate(SHOWN).startswith("Blocks 1 to 5: idle")
        page.evaluate("document.querySelector('#block-body button').click()")
        page.wait("document.activeElement.id === 'run-map'")
        page.press("ArrowRight")
        page.wait("document.querySelectorAll('#block-body .tokens li').length === 16")
        assert page.evaluate("document.getElementById('run-map-cell').textContent").startswith("Block 1: idle")
        require_quiet(page, server)


def test_labels_of_similar_branches_begin_at_their_difference(tmp_path: Path) -> None:
    begin = "You answer the customers of a shop, politely and in one sentence, "
    texts = [f"{begin}as a {trade} would. Rule 1" for trade in ("baker", "tailor")]
    branches = [{"text": texts[0], "below": 1}, {"text": "Is it open?", "below": 0}, {"text": texts[1], "below": 0}]
    with running_server(tiny_engine(num_blocks=60)) as server, browser(tmp_path) as page:
        open_page(page, server)
        shown = page.evaluate(f"import('./tree.js').then((found) => found.textsOf({json.dumps(branches)}))")
    assert shown == [
        "You answer the c\u2026 baker would. Rule 1",
        "Is it open?",
        "You answer the c\u2026 tailor would. Rule 1",
    ]


def test_pictures_can_be_taken(tmp_path: Path) -> None:
    """Both colour schemes draw, and differ."""
    with running_server(tiny_engine(num_blocks=60)) as server, browser(tmp_path) as page:
        open_page(page, server)
        paper = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(paper)
        page.set_dark(True)
        assert page.evaluate(paper) != light
        page.picture(tmp_path / "dark.png")
        assert (tmp_path / "dark.png").read_bytes().startswith(base64.b64decode("iVBORw0KGgo="))


def test_tenants_are_a_table_and_their_names_are_text(tmp_path: Path) -> None:
    hostile = "<b onclick=alert(1)>\u202e" + "w" * 150
    tenants = (Tenant("acme", min_blocks=30), Tenant(hostile, max_held=9))
    engine = tiny_engine(num_blocks=100, cache_options={"tenants": tenants})
    size = engine.cache.stats().block_bytes
    assert size > 1024
    engine.generate([list(range(70))], SamplingParams(max_tokens=1), tenant="acme")
    uses = {use.name: use for use in engine.cache.stats().tenants}
    with running_server(engine) as server, browser(tmp_path) as page:
        open_page(page, server)
        page.wait("document.querySelectorAll('#tenant-lines tr').length === 3")
        cells = json.loads(
            page.evaluate(
                "JSON.stringify([...document.querySelectorAll('#tenant-lines tr')].map((row) => "
                "[...row.cells].map((cell) => cell.textContent)))"
            )
        )
        acme = [0, 4 * size, 0, 30 * size, uses["acme"].share * size]
        told = json.loads(page.evaluate(f"import('./text.js').then((text) => JSON.stringify({acme}.map(text.bytes)))"))
        assert cells[0] == ["acme", *told]
        assert sorted(row[0] for row in cells[1:]) == sorted(("*", hostile.replace("\u202e", "⟨U+202E⟩")))
        for width in (1280, 390):
            page.resize(width, 800)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        require_quiet(page, server)
