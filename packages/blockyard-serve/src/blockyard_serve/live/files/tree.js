// The tree of cached prompts: its largest branches, and the latest prompts' hits in each.

import { count, make, onOneLine, share, times } from "./text.js";
import { askJson } from "./wire.js";

// Characters to show of a common beginning that is shortened.
const HEAD = 16;

// The branches' texts on one line. Children of one branch are shown from the word in which they differ.
export function textsOf(branches) {
  const texts = branches.map((branch) => onOneLine(branch.text)), groups = new Map(), open = [];
  branches.forEach((branch, place) => {
    while (open.length && open[open.length - 1].below === 0) open.pop();
    if (open.length) open[open.length - 1].below--;
    const parent = open.length ? open[open.length - 1].place : -1;
    groups.set(parent, [...(groups.get(parent) ?? []), place]);
    open.push({ place, below: branch.below });
  });
  const shown = [...texts];
  for (const places of groups.values()) for (const place of places) {
    const text = texts[place], others = places.filter((other) => texts[other] !== text);
    const same = Math.max(0, ...others.map((other) => common(text, texts[other])));
    const from = text.lastIndexOf(" ", same) + 1;
    if (from > 2 * HEAD) shown[place] = `${text.slice(0, HEAD)}\u2026 ${text.slice(from)}`;
  }
  return shown;
}

function common(one, other) {
  let length = 0;
  while (length < one.length && one[length] === other[length]) length++;
  return length;
}

export class Tree {
  // light: called with {name, cells} to highlight, or null; cellOf: returns the cell of a block.
  constructor(list, size, none, light, cellOf) {
    this.list = list;
    this.size = size;
    this.none = none;
    this.light = light;
    this.cellOf = cellOf;
    this.kept = null;
  }

  show({ branches, num_prompts: number, cached, rest, rest_branches: more }) {
    this.none.hidden = branches.length > 0;
    this.size.textContent = cached
      ? `${times(cached, "block", "blocks")}; requests are among the latest ${times(number, "prompt", "prompts")}` : "";
    const focused = [...this.list.querySelectorAll("button")].indexOf(document.activeElement);
    const lines = [], depths = [];
    let tenant = null;
    const tenants = new Set(branches.map((branch) => branch.tenant)).size;
    const texts = textsOf(branches);
    for (const [place, branch] of branches.entries()) {
      while (depths.length && depths[depths.length - 1].below === 0) this.leave(depths, lines);
      if (tenants > 1 && branch.tenant !== tenant && branch.depth === 0) {
        lines.push(make("li", "tenant", branch.tenant === 0 ? "No salt or adapter" : `Tenant ${branch.tenant}, with its own salt or adapter`));
        tenant = branch.tenant;
      }
      if (depths.length) depths[depths.length - 1].below--;
      lines.push(this.line(branch, depths.length, texts[place]));
      depths.push({ below: branch.below, rest: branch.rest, more: branch.rest_branches });
    }
    while (depths.length) this.leave(depths, lines);
    if (more) lines.push(this.rest(more, rest, 0));
    this.list.replaceChildren(...lines);
    if (focused >= 0) this.list.querySelectorAll("button")[focused]?.focus();
  }

  // After the shown children of a branch: one line for the rest.
  leave(depths, lines) {
    const { rest, more } = depths.pop();
    if (more) lines.push(this.rest(more, rest, depths.length + 1));
  }

  rest(number, blocks, depth) {
    const text = `and ${times(number, "smaller branch", "smaller branches")}, ${times(blocks, "block", "blocks")}`;
    const line = make("li", "rest quiet", text);
    line.style.marginLeft = `${Math.min(depth, 8) * 16}px`;
    return line;
  }

  line(branch, depth, shown) {
    const text = make("span", "text", shown || "(no text)");
    text.style.marginLeft = `${Math.min(depth, 8) * 16}px`;
    const bar = make("span", "bar", "", make("i"));
    bar.firstChild.style.width = `${(100 * branch.hit) / Math.max(branch.asked, 1)}%`;
    const part = make("span", "share", "", bar, make("span", "num", share(branch.hit, branch.asked)));
    const button = make("button", "", "", text, make("span", "num", times(branch.requests, "request", "requests")), part,
      make("span", "num cached", times(branch.blocks, "block", "blocks") + (branch.behind ? ` + ${count(branch.behind)}` : "")));
    button.type = "button";
    button.title = (branch.asked ? `${share(branch.hit, branch.asked)} of ${count(branch.asked)} prompt tokens here came from the cache; ` : "") +
      `${times(branch.blocks, "block", "blocks")} cached here, ${count(branch.behind)} below${branch.text ? `\n${onOneLine(branch.text)}` : ""}`;
    const key = `${branch.tenant} ${branch.depth} ${branch.text}`;
    button.setAttribute("aria-pressed", String(this.kept === key));
    button.addEventListener("click", () => this.press(button, key, branch.id));
    return make("li", "", "", button);
  }

  async press(button, key, id) {
    const isOff = this.kept === key;
    this.clear();
    this.light(null);
    if (isOff) return;
    this.kept = key;
    button.setAttribute("aria-pressed", "true");
    const { blocks } = await askJson(`state/branch/${id}`);
    if (this.kept === key) this.light({ name: key, cells: blocks.map(this.cellOf) });
  }

  clear() {
    this.kept = null;
    for (const button of this.list.querySelectorAll("[aria-pressed='true']")) button.setAttribute("aria-pressed", "false");
  }
}
