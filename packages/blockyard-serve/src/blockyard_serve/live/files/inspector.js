// Details of the selected block, or of the blocks in the selected cell, as text.

import { BlockMap } from "./map.js";
import { NAMES, WORDS } from "./states.js";
import { count, isMade, make, onOneLine, times, visible } from "./text.js";
import { askJson } from "./wire.js";

const AGAIN = 1000;

export class Inspector {
  // choose: called with the holder that was pressed.
  constructor(title, body, { map, choose }) {
    this.title = title;
    this.body = body;
    this.map = map;
    this.choose = choose;
    this.cell = null;
    this.detail = null;
    this.asked = 0;
    this.askedAt = 0;
    this.run = null;
  }

  // A cell of the map, or null.
  look(cell, isKept) {
    const isNew = cell !== this.cell || isKept !== this.isKept;
    if (cell !== this.cell) { this.detail = null; this.run = null; }
    this.cell = cell;
    this.isKept = isKept;
    if (cell === null) this.asked++;
    else if (isNew) this.read();
    this.write();
  }

  // Another frame is shown. A pinned block is read again from time to time, unless playback is paused.
  moved(frame, isHeld) {
    this.frame = frame;
    if (this.cell === null) return;
    if (!isHeld && this.isKept && performance.now() - this.askedAt > AGAIN) this.read();
    else this.write();
  }

  async read() {
    if (this.map.map.scale > 1) return;
    const block = this.map.firstBlock(this.cell), turn = ++this.asked;
    this.askedAt = performance.now();
    try {
      const detail = await askJson(`state/block/${block}`);
      if (turn !== this.asked) return;
      this.detail = detail;
    } catch (error) {
      if (turn !== this.asked) return;
      this.detail = { error: error.message };
    }
    this.write();
  }

  write() {
    if (this.cell === null) {
      this.title.textContent = "A block";
      this.body.replaceChildren(make("p", "quiet", "No block is selected."));
    } else if (this.map.map.scale > 1) this.writeRun();
    else this.writeBlock();
  }

  writeBlock() {
    const { state, count: holders } = this.map.one(this.cell);
    this.title.textContent = `Block ${count(this.map.firstBlock(this.cell))}: ${NAMES[state]}`;
    const facts = make("p", "facts");
    const fact = (name, value) => facts.append(make("span", "", "", `${name} `, make("b", "", value)));
    facts.append(make("span", "", WORDS[NAMES[state]]));
    fact("holders", holders > 30 ? "more than 30" : String(holders));
    const since = this.map.since[this.cell];
    fact("unchanged for", since === undefined ? "at least as long as this page is open" : `${Math.max(this.frame.at - since, 0).toFixed(1)} s`);
    const detail = this.detail;
    if (detail && !detail.error) {
      if (detail.num_tokens) fact("tokens", count(detail.num_tokens));
      if (detail.group) fact("group", String(detail.group));
      fact("read at step", count(detail.step));
    }
    this.body.replaceChildren(facts, ...this.hits(detail), ...this.holders(detail), ...this.tokens(detail));
  }

  // The latest prompts that hit the block.
  hits(detail) {
    if (!detail || !detail.hits) return [];
    const { num, of, ago, names } = detail.hits;
    if (num === 0) return [make("p", "hits", of ? `Not hit by the latest ${times(of, "prompt", "prompts")}.` : "No prompt has been answered yet.")];
    const last = ago === 0 ? "most recently by the latest" : `most recently ${times(ago, "prompt", "prompts")} before the latest`;
    const shown = names.filter((name) => !isMade(name)).map(onOneLine);
    const clients = shown.length ? `: ${shown.join(", ")}` : "";
    return [make("p", "hits", `Hit by ${count(num)} of the latest ${times(of, "prompt", "prompts")}, ${last}${clients}.`)];
  }

  holders(detail) {
    if (!detail || !detail.holders || detail.holders.length === 0) return [];
    const list = make("ul", "holders");
    list.setAttribute("aria-label", "Holders");
    for (const holder of detail.holders) {
      const button = make("button", "", onOneLine(holder));
      button.type = "button";
      button.addEventListener("click", () => this.choose(holder));
      list.append(make("li", "", "", button));
    }
    if (detail.num_holders > detail.holders.length) {
      list.append(make("li", "plain", `and ${count(detail.num_holders - detail.holders.length)} more`));
    }
    return [list];
  }

  tokens(detail) {
    if (!detail) return [make("p", "quiet", "Reading the block.")];
    if (detail.error) return [make("p", "quiet", visible(detail.error))];
    if (detail.tokens === null) return [make("p", "quiet", "This server does not show tokens.")];
    if (detail.tokens.length === 0) return [make("p", "quiet", detail.is_cached ? "Its tokens are no longer known." : "It has no tokens that a prompt can hit.")];
    const list = make("ol", "tokens");
    list.setAttribute("aria-label", "Tokens");
    detail.tokens.forEach((token, place) => {
      const item = make("li", "", detail.pieces ? onOneLine(detail.pieces[place]) : String(token));
      item.title = `token ${token}`;
      list.append(item);
    });
    return [list];
  }

  writeRun() {
    const words = this.map.words(this.cell), cut = words.indexOf(":");
    this.title.textContent = words.slice(0, cut);
    if (this.run) { this.runWords.textContent = words.slice(cut + 2); return; }
    this.runWords = make("p", "", words.slice(cut + 2));
    const open = make("button", "", "Show each block");
    open.type = "button";
    open.addEventListener("click", () => this.openRun());
    this.body.replaceChildren(this.runWords, make("p", "", "", open));
  }

  async openRun() {
    const first = this.map.firstBlock(this.cell);
    const run = await askJson(`state/run/${first}/${Math.min(this.map.map.scale, 1024)}`);
    const states = atob(run.states);
    const cells = Uint8Array.from(states, (sign, place) => sign.charCodeAt(0) | (Math.min(run.counts[place], 31) << 3));
    const box = make("div", "map"), detail = make("div");
    box.id = "run-map";
    box.tabIndex = 0;
    box.setAttribute("role", "grid");
    box.setAttribute("aria-label", "Blocks of the selected cell");
    this.body.replaceChildren(this.runWords, box, detail);
    const small = new BlockMap(box, { height: () => 120, told: (cell) => this.writeOne(detail, small, cell), flashes: false });
    small.show({ blocks: cells.length, scale: 1, width: 1, cells, first: run.first }, 0, false);
    this.run = small;
    box.focus();
  }

  async writeOne(place, small, cell) {
    if (cell === null) return place.replaceChildren();
    const turn = ++this.asked;
    place.replaceChildren(make("p", "", small.words(cell)));
    const detail = await askJson(`state/block/${small.firstBlock(cell)}`);
    if (turn === this.asked) place.replaceChildren(make("p", "", small.words(cell)), ...this.holders(detail), ...this.tokens(detail));
  }
}
