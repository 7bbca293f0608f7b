"""The page for a screen reader: Chromium's accessibility tree, the order of focus, and announcements."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

from blockyard_testing.browser import CHROMIUM, Browser, browser
from blockyard_testing.servers import running_server, tiny_engine

from .test_live_browser import load, open_page

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")

#: Roles that are operated or looked for by name.
NAMED = {
    "button",
    "textbox",
    "combobox",
    "slider",
    "grid",
    "image",
    "region",
    "group",
    "link",
    "log",
    "list",
    "heading",
}
LIVE_CHANGES = """(async () => {
  const live = "[aria-live]:not([aria-live=off]), [role=status], [role=alert], [role=log], output:not([aria-live=off])";
  const isLive = (node) => !!node.closest(live);
  const said = [];
  const seen = new MutationObserver((changes) => {
    for (const { target } of changes) {
      const node = target.nodeType === 1 ? target : target.parentElement;
      if (node && isLive(node)) said.push(node.id || node.tagName);
    }
  });
  seen.observe(document.body, { subtree: true, childList: true, characterData: true });
  const first = blockyard.frames.latest.n;
  for (let turn = 0; turn < 200 && blockyard.frames.latest.n < first + 10; turn++) {
    await new Promise((done) => { setTimeout(done, 100); });
  }
  seen.disconnect();
  return [blockyard.frames.latest.n - first, said];
})()"""
ORDER = """[...document.querySelectorAll("a[href], button, select, input, textarea, [tabindex]")]
  .filter((one) => one.tabIndex >= 0 && !one.disabled && one.checkVisibility())
  .map((one) => one.id || one.textContent)"""


def nodes(page: Browser) -> list[dict[str, Any]]:
    """What is not ignored: role, name, and properties by name."""
    page.send("Accessibility.enable")
    found = page.send("Accessibility.getFullAXTree")["nodes"]
    return [
        {
            "role": node["role"]["value"],
            "name": node.get("name", {}).get("value", ""),
            **{each["name"]: each["value"].get("value") for each in node.get("properties", [])},
        }
        for node in found
        if not node["ignored"]
    ]


@pytest.mark.parametrize("width", [390, 1280])
def test_every_control_has_a_role_and_a_name(width: int, tmp_path: Path) -> None:
    engine = tiny_engine(num_blocks=60, max_num_seqs=4, num_cpu_blocks=20)
    with running_server(engine) as server, browser(tmp_path) as page, load(server):
        open_page(page, server, 5, width=width)
        page.wait("document.querySelectorAll('#tree button').length > 0")
        page.evaluate("document.getElementById('pause').click(); document.getElementById('map').focus()")
        page.press("ArrowRight")
        found = nodes(page)
    roles = [node["role"] for node in found]
    assert roles.count("main") == roles.count("banner") == 1
    levels = [node["level"] for node in found if node["role"] == "heading"]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels)), levels
    assert {"button", "textbox", "combobox", "slider", "grid", "gridcell", "image"} <= set(roles)
    assert [node for node in found if node["role"] in NAMED and not node["name"].strip()] == []
    grids = [node["name"] for node in found if node["role"] == "grid"]
    assert grids == ["Blocks of the pool", "Blocks of the CPU pool"]
    cells = [node["name"] for node in found if node["role"] == "gridcell"]
    assert any(name.startswith("Block 1: ") for name in cells), cells
    assert [node["name"] for node in found if node.get("focused") and node["role"] != "RootWebArea"] == [grids[0]]
    live = {node["role"] for node in found if node.get("live") in ("polite", "assertive")}
    assert live <= {"status", "log"}


def test_screen_reader_gets_few_announcements(tmp_path: Path) -> None:
    """Frames come ten times a second; a screen reader hears a summary each twenty seconds and no more."""
    engine = tiny_engine(num_blocks=60, max_num_seqs=4)
    with running_server(engine) as server, browser(tmp_path) as page, load(server):
        open_page(page, server, 5)
        num_frames, said = page.evaluate(LIVE_CHANGES)
        live = [node for node in nodes(page) if node.get("live") in ("polite", "assertive")]
    assert num_frames >= 10
    assert len(said) <= 1, said
    assert all(node["live"] == "polite" for node in live)
    assert len(live) <= 3, live  # the summary, the connection's state, the conversation


def test_focus_goes_in_the_order_of_the_page(tmp_path: Path) -> None:
    with running_server(tiny_engine(num_blocks=60)) as server, browser(tmp_path) as page:
        open_page(page, server)
        page.evaluate("document.getElementById('pause').click(); document.activeElement.blur()")
        assert page.evaluate("document.querySelectorAll('[tabindex]').length") > 0
        assert page.evaluate("[...document.querySelectorAll('[tabindex]')].every((one) => one.tabIndex <= 0)")
        wanted, reached = page.evaluate(ORDER), []
        for _ in range(60):
            page.press("Tab")
            if page.evaluate("document.activeElement === document.body"):
                break
            reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        assert reached == wanted
