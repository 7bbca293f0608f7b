// The prefixes of the latest prompts: how often each was asked, what of it hit, and what is cached now.

import { count, make, onOneLine, share, times } from "./text.js";
import { askJson } from "./wire.js";

export class Tree {
  // light: called with {name, cells} or null; cellOf: from a block to its cell.
  constructor(list, size, none, light, cellOf) {
    this.list = list;
    this.size = size;
    this.none = none;
    this.light = light;
    this.cellOf = cellOf;
    this.kept = null;
  }

  show({ branches, num_prompts: number }) {
    this.none.hidden = branches.length > 0;
    this.size.textContent = number ? `of the latest ${times(number, "prompt", "prompts")}` : "";
    const focused = [...this.list.querySelectorAll("button")].indexOf(document.activeElement);
    const lines = [], depths = [];
    let tenant = null;
    const tenants = new Set(branches.map((branch) => branch.tenant)).size;
    for (const branch of branches) {
      if (tenants > 1 && branch.tenant !== tenant && branch.depth === 0) {
        lines.push(make("li", "tenant", branch.tenant === 0 ? "Without a salt" : `Tenant ${branch.tenant}, with a salt of its own`));
        tenant = branch.tenant;
      }
      while (depths.length && depths[depths.length - 1].below === 0) depths.pop();
      if (depths.length) depths[depths.length - 1].below--;
      lines.push(this.line(branch, depths.length));
      depths.push({ below: branch.below });
    }
    this.list.replaceChildren(...lines);
    if (focused >= 0) this.list.querySelectorAll("button")[focused]?.focus();
  }

  line(branch, depth) {
    const text = make("span", "text", onOneLine(branch.text) || "(no text)");
    text.style.marginLeft = `${Math.min(depth, 8) * 16}px`;
    const bar = make("span", "bar", "", make("i"));
    bar.firstChild.style.width = `${(100 * branch.hit) / Math.max(branch.asked, 1)}%`;
    const part = make("span", "share", "", bar, make("span", "num", share(branch.hit, branch.asked)));
    const button = make("button", "", "", text, make("span", "num", times(branch.requests, "request", "requests")), part,
      make("span", "num cached", `${count(branch.cached)} of ${times(branch.blocks, "block", "blocks")}`));
    button.type = "button";
    button.title = `${share(branch.hit, branch.asked)} of ${count(branch.asked)} tokens asked here came from the cache; ` +
      `${count(branch.cached)} of ${times(branch.blocks, "block", "blocks")} cached now`;
    const key = `${branch.tenant} ${branch.depth} ${branch.text}`;
    button.setAttribute("aria-pressed", String(this.kept === key));
    button.addEventListener("click", () => this.press(button, key, branch.id));
    return make("li", "", "", button);
  }

  async press(button, key, id) {
    const isOff = this.kept === key;
    this.letGo();
    this.light(null);
    if (isOff) return;
    this.kept = key;
    button.setAttribute("aria-pressed", "true");
    const { blocks } = await askJson(`state/branch/${id}`);
    if (this.kept === key) this.light({ name: key, cells: blocks.map(this.cellOf) });
  }

  letGo() {
    this.kept = null;
    for (const button of this.list.querySelectorAll("[aria-pressed='true']")) button.setAttribute("aria-pressed", "false");
  }
}
