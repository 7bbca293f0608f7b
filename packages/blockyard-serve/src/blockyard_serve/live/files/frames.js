// Moments of the cache: put together from the wire, kept for a while, and played live, slowly, or one by one.

const MAX_FRAMES = 600;
const bytes = (text) => Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));

function mapOf(told) {
  return told && { blocks: told.blocks, scale: told.scale, width: told.width, cells: bytes(told.cells), first: 1 };
}

function changedMap(map, runs) {
  if (!map || runs.length === 0) return map;
  const cells = map.cells.slice();
  for (const [start, text] of runs) cells.set(bytes(text), start * map.width);
  return { ...map, cells };
}

function changedRows(rows, told, gone) {
  const changed = new Map(rows);
  for (const handle of gone) changed.delete(handle);
  for (const { more, ...row } of told) {
    const before = changed.get(row.id);
    const path = row.path ?? (more ? [...before.path, ...more] : before.path);
    changed.set(row.id, { ...before, ...row, path });
  }
  return changed;
}

export class Frames {
  // show: called with a frame, and whether it follows the one shown before; added: with each that comes.
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

  take(name, told) {
    const head = { n: told.n, at: told.at, step: told.step, totals: told.totals, numRows: told.num_rows, gap: told.gap };
    if (name === "frame") {
      const rows = new Map(told.rows.map((row) => [row.id, row]));
      this.add({ ...head, map: mapOf(told.map), cpu: mapOf(told.cpu), rows });
      return true;
    }
    const before = this.latest;
    if (!before || before.n !== told.after) return false;
    this.add({
      ...head, map: changedMap(before.map, told.changed), cpu: changedMap(before.cpu, told.cpu_changed),
      rows: changedRows(before.rows, told.rows, told.gone),
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

  // The next frame after as much time as lay between the two, stretched.
  playOn() {
    const next = this.list[this.place + 1];
    if (!next || this.isHeld) { this.timer = 0; return; }
    const seconds = Math.min((next.at - this.shown.at) / this.speed, 5);
    this.timer = setTimeout(() => { this.go(this.place + 1); this.playOn(); }, 1000 * seconds);
  }
}
