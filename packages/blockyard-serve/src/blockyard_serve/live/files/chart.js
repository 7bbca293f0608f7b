// The last two minutes: use of the pool, hits, evictions and preemptions.

import { fillOf, mixed, readColors, PENDING, PRIVATE, SHARED } from "./states.js";
import { bytes, count, make, share, times } from "./text.js";

const SECONDS = 120;
const BAND = ["private", "pending", "shared", "idle"];
const CAUSES = [
  ["hit", "hit", "--shared"], ["tail", "tail of a prompt", "--line-2"], ["never_seen", "never seen", "--quiet"],
  ["evicted", "evicted", "--evicted"], ["other_keys", "other salt or adapter", "--pending"], ["recomputed", "recomputed", "--private"],
];

export class Chart {
  constructor(canvas, words, figures, causes) {
    this.canvas = canvas;
    this.words = words;
    this.figures = figures;
    this.causes = causes;
    this.points = [];
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  past(points) {
    this.points = points.slice();
    this.draw();
  }

  add(frame) {
    const last = this.points[this.points.length - 1];
    if (last && frame.at <= last.at) return;
    this.points.push({ at: frame.at, totals: frame.totals, gap: frame.gap });
    while (this.points.length > 2 && this.points[1].at < frame.at - SECONDS) this.points.shift();
  }

  // Show the time up to the shown frame.
  show(frame) {
    this.frame = frame;
    this.seen = this.points.filter((point) => point.at <= frame.at && point.at >= frame.at - SECONDS);
    this.spans = this.seen.reduce((spans, point) => {
      if (point.gap || spans.length === 0) spans.push([]);
      spans[spans.length - 1].push(point);
      return spans;
    }, []);
    this.write();
    this.draw();
  }

  // Growth of a count while a page was open.
  grown(count) {
    return this.spans.reduce((sum, span) => sum + count(span[span.length - 1].totals) - count(span[0].totals), 0);
  }

  unseenSeconds() {
    return this.spans.slice(1).reduce((sum, span, place) => sum + span[0].at - this.spans[place].at(-1).at, 0);
  }

  write() {
    const { totals } = this.frame;
    const held = totals.private + totals.shared + totals.pending + totals.retiring + totals.loading;
    const usable = held + totals.idle + totals.free;
    const grown = (name) => this.grown((at) => at[name]), unseen = this.unseenSeconds();
    const rows = [
      ["in use", share(held, usable)], ["tokens hit", share(grown("hit"), grown("prompt"))],
      ["running", count(totals.running)], ["waiting", count(totals.waiting)],
      ["evicted", count(grown("evicted"))], ["preempted", count(grown("preempted"))], ["copied on write", count(grown("copied"))],
      ...(totals.padding ? [["padding between layer groups", bytes(totals.padding)]] : []),
    ];
    this.figures.replaceChildren(...rows.map(([name, value]) => make("div", "", "", make("dt", "", name), make("dd", "", value))));
    const used = this.seen.map(({ totals: at }) => at.private + at.shared + at.pending + at.retiring + at.loading);
    const least = Math.min(...used, held), most = Math.max(...used, held);
    this.words.textContent = `Between ${count(least)} and ${count(most)} of ${count(usable)} blocks were held; ` +
      `${share(grown("hit"), grown("prompt"))} of ${count(grown("prompt"))} prompt tokens came from the cache; ` +
      `${times(grown("evicted"), "block was", "blocks were")} evicted, ${times(grown("preempted"), "sequence", "sequences")} preempted.` +
      (unseen > 0 ? ` No page was open for ${Math.round(unseen)} s, so nothing is known about that time.` : "");
    this.writeCauses(totals);
  }

  writeCauses(totals) {
    if (!totals.causes) {
      this.causes.replaceChildren(make("p", "hint", "Start the server with --track-misses to see the causes of misses."));
      return;
    }
    const parts = CAUSES.map(([key, name, color]) => [
      name, color, this.grown((at) => (key === "hit" ? at.hit : (at.causes || totals.causes)[key])),
    ]).filter(([, , part]) => part > 0);
    const whole = parts.reduce((sum, [, , part]) => sum + part, 0);
    if (whole === 0) {
      this.causes.replaceChildren(make("p", "hint", "No prompt was admitted in this time."));
      return;
    }
    const bar = make("div", "bar"), list = make("ul");
    for (const [name, color, part] of parts) {
      const piece = make("i"), swatch = make("i");
      piece.style.width = `${(100 * part) / whole}%`;
      piece.style.background = swatch.style.background = `var(${color})`;
      bar.append(piece);
      list.append(make("li", "", "", swatch, make("span", "", `${name} ${share(part, whole)}`)));
    }
    bar.setAttribute("aria-hidden", "true");
    this.causes.replaceChildren(bar, list);
  }

  draw() {
    const wide = this.canvas.clientWidth, high = this.canvas.clientHeight;
    if (!this.frame || !wide) return;
    const scale = devicePixelRatio || 1, colors = readColors();
    this.canvas.width = wide * scale;
    this.canvas.height = high * scale;
    const canvas = this.canvas.getContext("2d");
    canvas.scale(scale, scale);
    const left = 40, right = wide - 6, end = this.frame.at;
    const x = (at) => right - ((end - at) / SECONDS) * (right - left);
    this.drawUse(canvas, x, left, right, 6, 84, colors);
    this.drawHits(canvas, x, left, right, 102, 140, colors);
    this.drawMarks(canvas, x, 98, colors);
    canvas.fillStyle = colors.quiet;
    canvas.textAlign = "center";
    canvas.textBaseline = "alphabetic";
    for (const seconds of wide > 520 ? [120, 90, 60, 30] : [120, 60]) {
      canvas.textAlign = seconds === 120 ? "left" : "center";
      canvas.fillText(`${seconds} s ago`, x(end - seconds), high - 8);
    }
    canvas.textAlign = "right";
    canvas.fillText("shown now", right, high - 8);
  }

  axis(canvas, left, right, top, bottom, colors, name) {
    canvas.font = "11px system-ui, sans-serif";
    canvas.textAlign = "right";
    canvas.textBaseline = "middle";
    canvas.fillStyle = colors.quiet;
    canvas.fillText("100 %", left - 6, top + 4);
    canvas.fillText(name, left - 6, (top + bottom) / 2);
    canvas.fillText("0", left - 6, bottom - 3);
    canvas.strokeStyle = colors.line;
    canvas.lineWidth = 1;
    for (const y of [top, (top + bottom) / 2, bottom]) {
      canvas.beginPath();
      canvas.moveTo(left, Math.round(y) + 0.5);
      canvas.lineTo(right, Math.round(y) + 0.5);
      canvas.stroke();
    }
  }

  drawUse(canvas, x, left, right, top, bottom, colors) {
    this.axis(canvas, left, right, top, bottom, colors, "pool");
    const fills = [fillOf(PRIVATE, 2), fillOf(PENDING, 2), fillOf(SHARED, 2), mixed(colors.card, colors.idle, 0.35)];
    for (const span of this.spans) this.drawSpan(canvas, x, span, bottom, bottom - top, fills);
  }

  drawSpan(canvas, x, span, bottom, high, fills) {
    const parts = span.map(({ at, totals }) => {
      const whole = totals.private + totals.shared + totals.idle + totals.pending + totals.loading + totals.retiring + totals.free;
      let sum = 0;
      return [x(at), BAND.map((name) => (sum += (totals[name] + (name === "pending" ? totals.loading : 0)) / whole))];
    });
    if (parts.length < 2) return;
    for (let band = BAND.length - 1; band >= 0; band--) {
      canvas.beginPath();
      canvas.moveTo(parts[0][0], bottom);
      parts.forEach(([at, sums], place) => {
        if (place > 0) canvas.lineTo(at, bottom - parts[place - 1][1][band] * high);
        canvas.lineTo(at, bottom - sums[band] * high);
      });
      canvas.lineTo(parts[parts.length - 1][0], bottom);
      canvas.fillStyle = fills[band];
      canvas.fill();
    }
  }

  // A bar for each interval with admitted prompts, long enough to be visible.
  drawHits(canvas, x, left, right, top, bottom, colors) {
    this.axis(canvas, left, right, top, bottom, colors, "hit");
    for (const span of this.spans) {
      let first = span[0];
      for (const point of span) {
        if (point.at - first.at < 2 && point !== span[span.length - 1]) continue;
        const prompt = point.totals.prompt - first.totals.prompt, hit = point.totals.hit - first.totals.hit;
        if (prompt > 0) {
          const from = Math.max(x(first.at), x(point.at - 4)), wide = Math.max(x(point.at) - from - 1, 1.5);
          canvas.fillStyle = colors.line;
          canvas.fillRect(from, top, wide, bottom - top);
          canvas.fillStyle = colors.shared;
          canvas.fillRect(from, bottom - (hit / prompt) * (bottom - top), wide, (hit / prompt) * (bottom - top));
        }
        first = point;
      }
    }
  }

  drawMarks(canvas, x, y, colors) {
    this.seen.forEach((point, place) => {
      if (place === 0 || point.gap) return;
      const before = this.seen[place - 1].totals;
      if (point.totals.evicted > before.evicted) {
        canvas.fillStyle = colors.evicted;
        canvas.fillRect(x(point.at) - 0.75, y - 8, 1.5, 6);
      }
      if (point.totals.preempted > before.preempted) {
        canvas.fillStyle = colors.ink;
        canvas.beginPath();
        canvas.moveTo(x(point.at) - 4, y - 9);
        canvas.lineTo(x(point.at) + 4, y - 9);
        canvas.lineTo(x(point.at), y - 2);
        canvas.fill();
      }
    });
  }
}
