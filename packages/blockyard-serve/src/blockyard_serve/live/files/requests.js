// Running requests. Pointing at one highlights its blocks in order.

import { LOADING, PENDING, PRIVATE, RETIRING, SHARED } from "./states.js";
import { count, isMade, make, onOneLine, times } from "./text.js";

// The parts of a request's bar, by what its blocks are.
const PARTS = [["shared with other requests", "--shared"], ["cached, not shared", "--own"], ["pending or loading", "--pending"], ["private", "--private"]];

export class Requests {
  // light: called with {name, cells} to highlight, or null. own: names of requests that this page sent.
  constructor(list, queue, light, own) {
    this.list = list;
    this.queue = queue;
    this.light = light;
    this.own = own;
    this.lines = new Map();
    this.kept = null;
    this.pointed = null;
  }

  show(frame) {
    this.rows = frame.rows;
    const { running, waiting } = frame.totals, unlisted = frame.numRows - frame.rows.size;
    const more = unlisted > 0 ? `; ${count(unlisted)} sequences are not listed` : "";
    this.queue.textContent = `${count(running)} running, ${count(waiting)} waiting${more}`;
    for (const [handle, line] of this.lines) if (!frame.rows.has(handle)) { line.item.remove(); this.lines.delete(handle); }
    for (const row of frame.rows.values()) this.write(row, frame.map);
    if (this.kept !== null && !frame.rows.has(this.kept)) this.kept = null;
    if (this.pointed !== null && !frame.rows.has(this.pointed)) this.pointed = null;
    this.update();
  }

  write(row, map) {
    if (!this.lines.has(row.id)) this.lines.set(row.id, this.line(row));
    const line = this.lines.get(row.id);
    this.draw(line, row, map);
    if (line.row === row) return;
    line.row = row;
    line.holder.textContent = onOneLine(row.holder || "sequence");
    line.name.textContent = this.own.has(row.name) ? "this page" : isMade(row.name) ? "" : onOneLine(row.name);
    line.size.textContent = `${times(row.tokens, "token", "tokens")}, ${times(row.blocks, "block", "blocks")}`;
    if (this.own.has(row.name) && this.kept === null && !line.wasKept) { line.wasKept = true; this.kept = row.id; }
  }

  // The size of each part in blocks. With several blocks per cell only the computed part is known.
  draw(line, row, map) {
    const parts = [0, 0, 0, 0];
    for (const cell of map.scale === 1 ? row.path : []) {
      const state = map.cells[cell] & 7;
      if (state === SHARED) parts[map.cells[cell] >> 3 > 1 ? 0 : 1]++;
      else if (state === PENDING || state === LOADING) parts[2]++;
      else if (state === PRIVATE || state === RETIRING) parts[3]++;
    }
    if (map.scale > 1) parts[0] = row.computed / Math.max(row.tokens, 1);
    const whole = map.scale > 1 ? 1 : Math.max(row.path.length, 1);
    parts.forEach((part, place) => { line.parts[place].style.width = `${(100 * part) / whole}%`; });
    const said = map.scale > 1 ? [] : PARTS.map(([words], place) => [words, parts[place]]).filter(([, part]) => part > 0);
    const facts = [`${count(row.computed)} of ${count(row.tokens)} tokens computed`, ...said.map(([words, part]) => `${part} ${words}`)];
    line.button.title = facts.join(", ") + (row.swapped ? ", swapped out" : "");
  }

  line(row) {
    const holder = make("b"), name = make("i"), size = make("em"), bar = make("span", "bar");
    const parts = PARTS.map(([, color]) => {
      const part = make("i");
      part.style.background = `var(${color})`;
      return part;
    });
    bar.append(...parts);
    const button = make("button", "", "", make("span", "who", "", holder, name, size), bar);
    button.type = "button";
    const item = make("li", "", "", button);
    button.addEventListener("mouseenter", () => { this.pointed = row.id; this.update(); });
    button.addEventListener("mouseleave", () => { this.pointed = null; this.update(); });
    button.addEventListener("focus", () => { this.pointed = row.id; this.update(); });
    button.addEventListener("blur", () => { this.pointed = null; this.update(); });
    button.addEventListener("click", () => { this.kept = this.kept === row.id ? null : row.id; this.pointed = this.kept; this.update(); });
    this.list.append(item);
    return { item, button, holder, name, size, parts, row: null };
  }

  // Highlight the request under the pointer, or else the pinned one.
  update() {
    for (const [handle, { button }] of this.lines) button.setAttribute("aria-pressed", String(handle === this.kept));
    const handle = this.pointed ?? this.kept;
    const row = handle === null ? null : this.rows.get(handle);
    this.light(row ? { name: `row ${handle}`, cells: row.path } : null);
  }

  // Pin the request of this holder, if it is listed.
  keep(holder) {
    const found = [...this.lines.values()].find(({ row }) => holder === row.holder || holder.startsWith(`${row.holder} (`));
    if (!found) return;
    this.kept = found.row.id;
    this.update();
    found.item.scrollIntoView({ block: "nearest" });
  }

  clear() { this.kept = this.pointed = null; if (this.rows) this.update(); }
}
