// The requests that run: point at one and its blocks light up in order.

import { count, make, onOneLine, times } from "./text.js";

export class Requests {
  // light: called with {name, cells} or null. own: names of requests that this page sent.
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
    for (const row of frame.rows.values()) this.write(row);
    if (this.kept !== null && !frame.rows.has(this.kept)) this.kept = null;
    if (this.pointed !== null && !frame.rows.has(this.pointed)) this.pointed = null;
    this.update();
  }

  write(row) {
    if (!this.lines.has(row.id)) this.lines.set(row.id, this.line(row));
    const line = this.lines.get(row.id);
    if (line.row === row) return;
    line.row = row;
    line.holder.textContent = onOneLine(row.holder || "sequence");
    line.name.textContent = this.own.has(row.name) ? "this page" : onOneLine(row.name);
    line.size.textContent = `${times(row.tokens, "token", "tokens")}, ${times(row.blocks, "block", "blocks")}`;
    line.done.style.width = `${(100 * row.computed) / Math.max(row.tokens, 1)}%`;
    line.button.title = `${count(row.computed)} of ${count(row.tokens)} tokens computed${row.swapped ? ", swapped out" : ""}`;
    if (this.own.has(row.name) && this.kept === null && !line.wasKept) { line.wasKept = true; this.kept = row.id; }
  }

  line(row) {
    const holder = make("b"), name = make("i"), size = make("em"), done = make("i");
    const button = make("button", "", "", make("span", "who", "", holder, name, size), make("span", "bar", "", done));
    button.type = "button";
    const item = make("li", "", "", button);
    button.addEventListener("mouseenter", () => { this.pointed = row.id; this.update(); });
    button.addEventListener("mouseleave", () => { this.pointed = null; this.update(); });
    button.addEventListener("focus", () => { this.pointed = row.id; this.update(); });
    button.addEventListener("blur", () => { this.pointed = null; this.update(); });
    button.addEventListener("click", () => { this.kept = this.kept === row.id ? null : row.id; this.pointed = this.kept; this.update(); });
    this.list.append(item);
    return { item, button, holder, name, size, done, row: null };
  }

  // Light what is pointed at, else what is kept.
  update() {
    for (const [handle, { button }] of this.lines) button.setAttribute("aria-pressed", String(handle === this.kept));
    const handle = this.pointed ?? this.kept;
    const row = handle === null ? null : this.rows.get(handle);
    this.light(row ? { name: `row ${handle}`, cells: row.path } : null);
  }

  // Keep the request of this holder, if it is listed.
  keep(holder) {
    const found = [...this.lines.values()].find(({ row }) => holder === row.holder || holder.startsWith(`${row.holder} (`));
    if (!found) return;
    this.kept = found.row.id;
    this.update();
    found.item.scrollIntoView({ block: "nearest" });
  }

  letGo() { this.kept = this.pointed = null; if (this.rows) this.update(); }
}
