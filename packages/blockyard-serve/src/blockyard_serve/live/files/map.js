// The map of a pool: cells in rows on a canvas, a cursor for pointer and keyboard, and a path that is drawn in order.

import { drawCell, drawShares, FREE, IDLE, LOADING, mixed, NAMES, PENDING, PRIVATE, readColors, SHARES, WORDS } from "./states.js";
import { count, make, times } from "./text.js";

const GUTTER = 46;
const TOP = 3; // room for the frame around a cell of the first row
const FLASH = 700;
const STILL = matchMedia("(prefers-reduced-motion: reduce)");

export class BlockMap {
  // told: called with (cell, whether it is pinned), or (null) without a cursor; key: handles other keys.
  constructor(box, { height, told, key = () => false, flashes = true }) {
    this.box = box;
    this.height = height;
    this.told = told;
    this.key = key;
    this.flashes = flashes;
    this.canvas = make("canvas");
    this.canvas.setAttribute("aria-hidden", "true");
    this.cell = make("div", "unseen");
    this.cell.id = `${box.id}-cell`;
    this.cell.setAttribute("role", "gridcell");
    const row = make("div", "", "", this.cell);
    row.setAttribute("role", "row");
    box.append(this.canvas, row);
    this.map = null;
    this.cursor = -1;
    this.isKept = false;
    this.path = null;
    this.flashAt = new Map();
    this.since = [];
    this.listen();
  }

  listen() {
    const box = this.box;
    box.addEventListener("pointermove", (event) => { if (event.pointerType === "mouse" && !this.isKept) this.moveTo(this.at(event)); });
    box.addEventListener("pointerleave", () => { if (!this.isKept) this.moveTo(-1); });
    box.addEventListener("click", (event) => {
      const cell = this.at(event);
      this.isKept = cell >= 0 && !(this.isKept && cell === this.cursor);
      this.moveTo(cell);
    });
    box.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.draw()).observe(box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  onKey(event) {
    if (!this.map || event.ctrlKey || event.metaKey || event.altKey) return;
    const { columns } = this.layout(), last = this.numCells - 1, here = Math.max(this.cursor, 0);
    const moves = {
      ArrowRight: here + (this.cursor >= 0 ? 1 : 0), ArrowLeft: here - 1, ArrowDown: here + columns, ArrowUp: here - columns,
      PageDown: here + 5 * columns, PageUp: here - 5 * columns, Home: 0, End: last,
    };
    if (event.key in moves) {
      this.isKept = false;
      this.moveTo(Math.min(Math.max(moves[event.key], 0), last));
    } else if (event.key === "Enter" && this.cursor >= 0) {
      this.isKept = true;
      this.moveTo(this.cursor);
    } else if (event.key === "Escape") {
      this.isKept = false;
      this.moveTo(-1);
    } else if (!this.key(event.key)) return;
    event.preventDefault();
  }

  get numCells() { return this.map ? this.map.cells.length / this.map.width : 0; }

  layout() {
    const width = this.box.clientWidth, number = Math.max(this.numCells, 1);
    const gutter = width > 560 ? GUTTER : 0;
    const room = Math.max(width - gutter, 40);
    const pitch = Math.min(Math.max(Math.floor(Math.sqrt((room * this.height()) / number)), 5), 36);
    let columns = Math.max(Math.floor(room / pitch), 1);
    if (columns > 24) columns -= columns % (columns > 60 ? 10 : 4);
    const wide = Math.min(room / columns, 40);
    const gap = wide >= 14 ? 3 : wide >= 8 ? 2 : 1;
    const whole = wide > 9 ? Math.floor(wide) : Math.floor(wide * 2) / 2;
    return { columns, pitch: whole, gap, gutter, rows: Math.ceil(number / columns) };
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect(), { columns, pitch, gutter } = this.layout();
    const x = event.clientX - box.left - gutter, y = event.clientY - box.top - TOP;
    if (x < 0 || y < 0 || x >= columns * pitch) return -1;
    const cell = Math.floor(y / pitch) * columns + Math.floor(x / pitch);
    return cell < this.numCells ? cell : -1;
  }

  // State and reference count of a cell with one block.
  one(cell, map = this.map) { return { state: map.cells[cell] & 7, count: map.cells[cell] >> 3 }; }

  firstBlock(cell) { return this.map.first + cell * this.map.scale; }

  // Description of a cell.
  words(cell) {
    const first = this.firstBlock(cell);
    if (this.map.scale === 1) {
      const { state, count: holders } = this.one(cell);
      const held = holders > 0 ? `, ${holders > 30 ? "more than 30 holders" : times(holders, "holder", "holders")}` : "";
      return `Block ${count(first)}: ${NAMES[state]}${held}; ${WORDS[NAMES[state]]}`;
    }
    const last = Math.min(first + this.map.scale - 1, this.map.first + this.map.blocks - 1);
    const at = cell * this.map.width;
    const parts = SHARES.map((state, place) => [NAMES[state], this.map.cells[at + place]]).filter(([, part]) => part > 0);
    const said = parts.map(([name, part]) => `${name} ${Math.max(Math.round(part / 2.55), 1)} %`).join(", ");
    return `Blocks ${count(first)} to ${count(last)}: ${said || "all free"}`;
  }

  moveTo(cell) {
    const isNew = cell !== this.cursor;
    this.cursor = cell;
    this.describe();
    if (isNew || this.isKept) this.told(cell < 0 ? null : cell, this.isKept);
    this.draw();
  }

  describe() {
    const { columns, rows } = this.layout();
    this.box.setAttribute("aria-rowcount", rows);
    this.box.setAttribute("aria-colcount", columns);
    if (this.cursor < 0 || !this.map) {
      this.box.removeAttribute("aria-activedescendant");
      return;
    }
    this.box.setAttribute("aria-activedescendant", this.cell.id);
    this.cell.setAttribute("aria-colindex", (this.cursor % columns) + 1);
    this.cell.parentNode.setAttribute("aria-rowindex", Math.floor(this.cursor / columns) + 1);
    this.cell.textContent = this.words(this.cursor);
  }

  // Show a frame. follows: it comes right after the previous one, so differences are recent changes.
  show(map, at, follows) {
    const before = this.map;
    this.map = map;
    if (!before || before.blocks !== map.blocks || before.scale !== map.scale || before.first !== map.first) {
      this.since = [];
      this.flashAt.clear();
      if (this.cursor >= this.numCells) this.cursor = -1;
    } else if (before.cells !== map.cells) this.note(before, map, at, follows);
    if (this.cursor >= 0) this.describe();
    this.draw();
  }

  note(before, map, at, follows) {
    const now = performance.now();
    for (let cell = 0; cell < this.numCells; cell++) {
      if (map.width === 1 ? map.cells[cell] === before.cells[cell] : !differs(map, before, cell)) continue;
      this.since[cell] = at;
      if (!follows || !this.flashes || STILL.matches || map.width > 1) continue;
      const [old, fresh] = [before.cells[cell] & 7, map.cells[cell] & 7];
      const isEvicted = old === IDLE && [PRIVATE, PENDING, LOADING, FREE].includes(fresh);
      if (old !== fresh) this.flashAt.set(cell, [now, isEvicted]);
    }
  }

  // Highlight the cells of a path one after another.
  light(path) {
    if (path && this.path && this.path.name === path.name) this.path = { ...path, from: this.path.from };
    else this.path = path && { ...path, from: STILL.matches ? -1e9 : performance.now() };
    this.draw();
  }

  draw() {
    if (!this.isAsked) {
      this.isAsked = true;
      requestAnimationFrame(() => { this.isAsked = false; this.drawNow(); });
    }
  }

  drawNow() {
    if (!this.map || this.box.clientWidth === 0) return;
    const colors = readColors(), layout = this.layout(), { columns, pitch, gap, gutter, rows } = layout;
    const scale = devicePixelRatio || 1, wide = this.box.clientWidth, high = rows * pitch + 2 * TOP;
    const target = this.canvas;
    if (target.width !== Math.round(wide * scale) || target.height !== Math.round(high * scale)) {
      target.width = Math.round(wide * scale);
      target.height = Math.round(high * scale);
      target.style.height = `${high}px`;
    }
    const canvas = target.getContext("2d");
    canvas.setTransform(scale, 0, 0, scale, 0, 0);
    canvas.clearRect(0, 0, wide, high);
    const place = (cell) => [gutter + (cell % columns) * pitch, TOP + Math.floor(cell / columns) * pitch];
    this.drawGutter(canvas, layout, colors);
    const size = pitch - gap, isDim = this.path && this.path.cells.length > 0;
    canvas.globalAlpha = isDim ? 0.28 : 1;
    for (let cell = 0; cell < this.numCells; cell++) this.drawOne(canvas, cell, ...place(cell), size);
    canvas.globalAlpha = 1;
    let isMoving = isDim && this.drawPath(canvas, place, size, colors);
    isMoving = this.drawFlashes(canvas, place, size, colors) || isMoving;
    if (this.cursor >= 0) {
      const [x, y] = place(this.cursor);
      canvas.strokeStyle = colors.card;
      canvas.lineWidth = 4;
      canvas.strokeRect(x - 1, y - 1, size + 2, size + 2);
      canvas.strokeStyle = colors.ink;
      canvas.lineWidth = 2;
      canvas.strokeRect(x - 1.5, y - 1.5, size + 3, size + 3);
    }
    if (isMoving) this.draw();
  }

  drawGutter(canvas, { columns, pitch, gutter, rows }, colors) {
    if (!gutter) return;
    canvas.fillStyle = colors.quiet;
    canvas.font = "11px system-ui, sans-serif";
    canvas.textAlign = "right";
    canvas.textBaseline = "middle";
    const each = Math.max(1, Math.ceil(26 / pitch));
    for (let row = 0; row < rows; row += each) {
      const block = this.map.first + row * columns * this.map.scale;
      canvas.fillText(block >= 100000 ? `${Math.round(block / 1000)}k` : count(block), gutter - 8, TOP + row * pitch + Math.min((pitch - 2) / 2, 16));
    }
  }

  drawOne(canvas, cell, x, y, size) {
    if (this.map.width === 1) {
      const { state, count: holders } = this.one(cell);
      drawCell(canvas, x, y, size, state, holders);
    } else {
      const at = cell * this.map.width;
      drawShares(canvas, x, y, size, this.map.cells.subarray(at, at + 4));
    }
  }

  // Return whether the path is not yet complete.
  drawPath(canvas, place, size, colors) {
    const { cells, from } = this.path, each = Math.min(60, 900 / cells.length);
    const reached = Math.min(Math.floor((performance.now() - from) / each) + 1, cells.length);
    const half = size / 2;
    for (const cell of cells.slice(0, reached)) this.drawOne(canvas, cell, ...place(cell), size);
    canvas.strokeStyle = mixed(colors.card, colors.ink, 0.75);
    canvas.lineWidth = size >= 12 ? 2 : 1.2;
    canvas.lineJoin = "round";
    canvas.beginPath();
    cells.slice(0, reached).forEach((cell, number) => {
      const [x, y] = place(cell);
      if (number === 0) canvas.moveTo(x + half, y + half);
      else canvas.lineTo(x + half, y + half);
    });
    canvas.stroke();
    const dot = (cell, isFirst) => {
      const [x, y] = place(cell);
      canvas.beginPath();
      canvas.arc(x + half, y + half, Math.max(size / 3.4, 2.5), 0, 7);
      canvas.fillStyle = isFirst ? colors.card : colors.ink;
      canvas.strokeStyle = colors.ink;
      canvas.fill();
      canvas.stroke();
    };
    dot(cells[reached - 1], false);
    dot(cells[0], true);
    return reached < cells.length;
  }

  drawFlashes(canvas, place, size, colors) {
    const now = performance.now();
    canvas.lineWidth = 2;
    for (const [cell, [at, isEvicted]] of this.flashAt) {
      const left = 1 - (now - at) / FLASH;
      if (left <= 0 || cell >= this.numCells) { this.flashAt.delete(cell); continue; }
      const [x, y] = place(cell);
      canvas.globalAlpha = left;
      canvas.strokeStyle = isEvicted ? colors.evicted : colors.ink;
      canvas.strokeRect(x - 1, y - 1, size + 2, size + 2);
    }
    canvas.globalAlpha = 1;
    return this.flashAt.size > 0;
  }
}

function differs(map, before, cell) {
  for (let at = cell * map.width; at < (cell + 1) * map.width; at++) if (map.cells[at] !== before.cells[at]) return true;
  return false;
}
