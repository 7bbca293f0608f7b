// Frames of the cache: decoded, stored for a while, and played live, slowly, or one by one.

const MAX_FRAMES = 600;
const bytes = (text) => Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));

function mapOf(data) {
  return data && { blocks: data.blocks, scale: data.scale, width: data.width, cells: bytes(data.cells), first: 1 };
}

function changedMap(map, runs) {
  if (!map || runs.length === 0) return map;
  const cells = map.cells.slice();
  for (const [start, text] of runs) cells.set(bytes(text), start * map.width);
  return { ...map, cells };
}

function changedRows(rows, updates, gone) {
  const changed = new Map(rows);
  for (const handle of gone) changed.delete(handle);
  for (const { more, ...row } of updates) {
    const before = changed.get(row.id);
    const path = row.path ?? (more ? [...before.path, ...more] : before.path);
    changed.set(row.id, { ...before, ...row, path });
  }
  return changed;
}

export class Frames {
  // show: called with the frame to show, and whether it follows the previous one; added: called with each new frame.
  constructor(show, added) {
    this.show = show;
    this.added = added;
    this.list = [];
    this.place = -1;
    this.isHeld = false;
    this.speed = 1;
    this.timer = 0;
  }

  get shown() { return this.list[this.place]; }
  get latest() { return this.list[this.list.length - 1]; }

  take(name, data) {
    const head = { n: data.n, at: data.at, step: data.step, totals: data.totals, numRows: data.num_rows, gap: data.gap };
    if (name === "frame") {
      const rows = new Map(data.rows.map((row) => [row.id, row]));
      this.add({ ...head, map: mapOf(data.map), cpu: mapOf(data.cpu), rows });
      return true;
    }
    const before = this.latest;
    if (!before || before.n !== data.after) return false;
    this.add({
      ...head, map: changedMap(before.map, data.changed), cpu: changedMap(before.cpu, data.cpu_changed),
      rows: changedRows(before.rows, data.rows, data.gone),
    });
    return true;
  }

  add(frame) {
    this.list.push(frame);
    this.added(frame);
    if (this.list.length > MAX_FRAMES) {
      this.list.shift();
      this.place = Math.max(this.place - 1, 0);
    }
    if (this.place < 0 || (!this.isHeld && this.speed === 1)) this.go(this.list.length - 1);
    else if (!this.isHeld && !this.timer) this.playOn();
    else this.show(this.shown, false);
  }

  go(place) {
    const next = Math.min(Math.max(place, 0), this.list.length - 1);
    const follows = next === this.place + 1;
    this.place = next;
    if (this.shown) this.show(this.shown, follows);
  }

  hold(isHeld) {
    this.isHeld = isHeld;
    clearTimeout(this.timer);
    this.timer = 0;
    if (!isHeld) this.speed === 1 ? this.go(this.list.length - 1) : this.playOn();
    else if (this.shown) this.show(this.shown, false);
  }

  playAt(speed) {
    this.speed = speed;
    this.hold(this.isHeld);
  }

  // Show the next frame after the time between the two frames, divided by the speed.
  playOn() {
    const next = this.list[this.place + 1];
    if (!next || this.isHeld) { this.timer = 0; return; }
    const seconds = Math.min((next.at - this.shown.at) / this.speed, 5);
    this.timer = setTimeout(() => { this.go(this.place + 1); this.playOn(); }, 1000 * seconds);
  }
}
