// The states of a block: descriptions, colours, and how a cell is drawn.

export const FREE = 0, PRIVATE = 1, SHARED = 2, IDLE = 3, PENDING = 4, RETIRING = 5, GONE = 6, LOADING = 7;
export const NAMES = ["free", "private", "shared", "idle", "pending", "retiring", "gone", "loading"];
export const WORDS = {
  private: "held, not cached", shared: "held and cached: any prompt can hit it", pending: "being computed",
  idle: "cached, held by none", free: "free", loading: "being filled from the CPU pool", retiring: "held, beyond the end of a pool that shrank", gone: "removed",
};
// Order of the fractions in a cell of several blocks.
export const SHARES = [PRIVATE, SHARED, IDLE, PENDING];

const colors = {};

export function readColors() {
  const style = getComputedStyle(document.documentElement);
  const names = ["private", "shared", "idle", "pending", "free", "retiring", "loading", "evicted", "card", "ink", "quiet", "line", "line-2"];
  for (const name of names) colors[name] = style.getPropertyValue(`--${name}`).trim();
  return colors;
}

const parts = (hex) => [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
export function mixed(from, to, part) {
  const [a, b] = [parts(from), parts(to)];
  return `rgb(${a.map((value, place) => Math.round(value + (b[place] - value) * part)).join(" ")})`;
}

// The more holders, the stronger the colour.
const strength = (count) => (count <= 1 ? 0.66 : count === 2 ? 0.86 : 1);
export function fillOf(state, count) {
  const color = colors[NAMES[state]];
  return count > 3 ? mixed(color, colors.ink, Math.min(0.14 + count / 60, 0.45)) : mixed(colors.card, color, strength(count));
}

// One cell of `size` pixels. Held blocks are full, idle ones hollow, pending ones half full, free ones a dot: the
// states differ in shape as well as in colour.
export function drawCell(canvas, x, y, size, state, count) {
  if (state === GONE) return;
  if (state === FREE) {
    const dot = Math.max(size / 5, 1.2);
    canvas.fillStyle = colors.free;
    canvas.fillRect(x + (size - dot) / 2, y + (size - dot) / 2, dot, dot);
    return;
  }
  if (state === IDLE) {
    const line = Math.min(Math.max(1, size / 10), 2);
    canvas.fillStyle = mixed(colors.card, colors.idle, 0.16);
    canvas.fillRect(x, y, size, size);
    canvas.strokeStyle = colors.idle;
    canvas.lineWidth = line;
    canvas.strokeRect(x + line / 2, y + line / 2, size - line, size - line);
    return;
  }
  canvas.fillStyle = state === PENDING ? mixed(colors.card, colors.pending, 0.28) : fillOf(state, count);
  canvas.fillRect(x, y, size, size);
  if (state === PENDING) {
    canvas.fillStyle = colors.pending;
    canvas.beginPath();
    canvas.moveTo(x, y + size);
    canvas.lineTo(x + size, y + size);
    canvas.lineTo(x + size, y);
    canvas.fill();
  }
  if (state === LOADING && size >= 4) { // a notch
    canvas.fillStyle = colors.card;
    canvas.fillRect(x + size / 3, y, size / 3, (2 * size) / 3);
  }
  if (state === RETIRING && size >= 6) {
    canvas.fillStyle = colors.card;
    canvas.fillRect(x + size / 4, y + size / 2 - 1, size / 2, 2);
  }
}

// A cell of several blocks: a column of fractions, held blocks at the bottom.
export function drawShares(canvas, x, y, size, shares) {
  canvas.fillStyle = colors.line;
  canvas.fillRect(x, y, size, size);
  let bottom = y + size;
  for (const place of [0, 1, 3, 2]) {
    const height = (size * shares[place]) / 255;
    if (height === 0) continue;
    canvas.fillStyle = place === 2 ? mixed(colors.card, colors.idle, 0.55) : colors[NAMES[SHARES[place]]];
    canvas.fillRect(x, Math.max(bottom - height, y), size, Math.min(height, bottom - y));
    bottom -= height;
  }
}
