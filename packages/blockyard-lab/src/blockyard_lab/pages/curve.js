(() => {
  const { sizes, policies } = data;
  const last = sizes.length - 1;
  const dashes = ["", "9 4", "2.5 3", "10 4 2.5 4"];
  const isOne = data.infinite.length === 1;
  const optimum = isOne ? policies.find((policy) => policy.is_optimum) : undefined;
  const lru = policies.find((policy) => policy.name === "lru");
  const hidden = new Set();
  const chart = document.getElementById("chart");
  const place = document.getElementById("place");
  const numbers = document.querySelectorAll("#numbers tbody tr");
  const state = { logarithmic: true, above: false, index: indexAt(data.knees[0].blocks) };
  let scale = null;
  let moving = null;

  const percent = (rate) => `${(100 * rate).toFixed(1)} %`;
  const gib = (blocks) => {
    const amount = (blocks * data.bytes_per_block) / 2 ** 30;
    return `${amount.toLocaleString("en-US", { maximumSignificantDigits: amount < 1000 ? 3 : 6 })} GiB`;
  };
  const color = (policy) => (policy.style < 0 ? "var(--ink)" : `var(--c${policy.style % data.colors})`);
  const dash = (policy) => (policy.style < 0 ? ["7 4", "2.5 4", "10 3 2 3", "2.5 8"][-1 - policy.style] : dashes[Math.floor(policy.style / data.colors) % dashes.length]);
  /** The number of the last size that is not above `blocks`. */
  function indexAt(blocks) {
    return Math.max(sizes.filter((size) => size <= blocks).length - 1, 0);
  }

  /** What is drawn of a policy: its hit rates, or how far they are above those of lru. */
  const drawn = (policy) => (state.above ? policy.rates.map((rate, number) => rate - lru.rates[number]) : policy.rates);
  const shown = () => policies.filter((policy) => !hidden.has(policy) && !(state.above && policy.is_optimum));

  // ---- scales

  function heights() {
    if (state.above) {
      const values = [0, ...shown().flatMap(drawn)];
      const [low, high] = [Math.min(...values), Math.max(...values)];
      const room = Math.max(0.08 * (high - low), 0.0005);
      return [low - room, high + room];
    }
    const top = Math.max(...data.infinite.map((one) => one.rate), ...policies.flatMap((policy) => policy.rates));
    return [0, top < 1e-5 ? 0.01 : Math.min(top * 1.16, 1.1)];
  }

  function measure(width) {
    const height = Math.round(Math.min(Math.max(width * 0.52, 290), Math.max(480, innerHeight * 0.66)));
    const box = { left: 50, right: width - 12, top: 52, bottom: height - 42 };
    const high = sizes[last];
    const spread = high >= 1.5 * sizes[0];
    const low = state.logarithmic ? (spread ? sizes[0] : high / 10) : 0;
    const part = state.logarithmic
      ? (size) => Math.log(size / low) / Math.log(high / low)
      : (size) => size / high;
    const [bottom, top] = heights();
    return {
      width, height, box, low, high, bottom, top,
      x: (size) => box.left + part(size) * (box.right - box.left),
      y: (rate) => box.bottom - ((rate - bottom) / (top - bottom)) * (box.bottom - box.top),
    };
  }

  /** 1, 2, 5, 10 and so on; 1, 3, 10, or 1, 10, 100 or fewer of these, where those are too many. */
  function logTicks(low, high, wanted) {
    const powers = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high) + 1e-9; power += 1) powers.push(power);
    const within = (tick) => tick >= low * 0.9999 && tick <= high * 1.0001;
    const choices = [[[1, 2, 5], 1], [[1, 3], 1], ...powers.map((_, number) => [[1], number + 1])];
    const found = choices.map(([factors, every]) =>
      powers.filter((power) => power % every === 0).flatMap((power) => factors.map((factor) => factor * 10 ** power)).filter(within),
    );
    return found.find((ticks) => ticks.length <= wanted) ?? [];
  }

  function ticks(factor) {
    const [low, high] = [scale.low * factor, scale.high * factor];
    const wanted = Math.max(3, Math.floor((scale.box.right - scale.box.left) / (state.logarithmic ? 48 : 74)));
    return state.logarithmic ? logTicks(low, high, wanted) : roundTicks(low, high, wanted);
  }

  // ---- the chart

  function redraw() {
    scale = measure(Math.max(chart.clientWidth, 260));
    chart.replaceChildren();
    const svg = draw(chart, "svg", {
      viewBox: `0 0 ${scale.width} ${scale.height}`, tabindex: 0, role: "slider", "aria-label": "Capacity in blocks",
      "aria-valuemin": sizes[0], "aria-valuemax": sizes[last],
    });
    drawAxes(svg);
    if (!state.above) {
      drawGap(svg);
      drawInfinite(svg);
    }
    for (const policy of shown()) drawPolicy(svg, policy);
    if (!state.above) for (const knee of data.knees) drawKnee(svg, knee);
    moving = draw(svg, "g", { "pointer-events": "none" });
    listen(svg);
    show();
  }

  function drawAxes(svg) {
    const { box, x, y } = scale;
    for (const rate of roundTicks(100 * scale.bottom, 100 * scale.top, 6)) {
      draw(svg, "line", { x1: box.left, x2: box.right, y1: y(rate / 100), y2: y(rate / 100), stroke: "var(--faint)" });
      const number = Number(rate.toPrecision(6));
      const label = state.above ? minus(`${number > 0 ? "+" : ""}${number}`) : `${number} %`;
      draw(svg, "text", { x: box.left - 8, y: y(rate / 100) + 4, "text-anchor": "end" }, label);
    }
    draw(svg, "line", { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom, stroke: "var(--quiet)" });
    drawTicks(svg, 1, box.bottom, 5, 18);
    drawTicks(svg, data.second_factor, box.top - 10, -5, -9);
    draw(svg, "text", { x: (box.left + box.right) / 2, y: box.bottom + 36, "text-anchor": "middle" }, "capacity (blocks)");
    draw(svg, "text", { x: box.left, y: 14 }, data.second_axis);
  }

  function drawTicks(svg, factor, at, length, offset) {
    for (const tick of ticks(factor)) {
      const x = scale.x(tick / factor);
      const anchor = x > scale.width - 24 ? "end" : "middle";
      draw(svg, "line", { x1: x, x2: x, y1: at, y2: at + length, stroke: "var(--quiet)" });
      draw(svg, "text", { x: anchor === "end" ? x + 8 : x, y: at + offset, "text-anchor": anchor }, short(tick));
    }
  }

  const line = (rates) => rates.map((rate, number) => `${scale.x(sizes[number]).toFixed(2)},${scale.y(rate).toFixed(2)}`);
  const between = (lower, upper) => [...line(lower), ...line(upper).reverse()].join(" ");

  function drawGap(svg) {
    const others = policies.filter((policy) => !policy.is_optimum && !hidden.has(policy));
    if (!optimum || hidden.has(optimum) || others.length === 0) return;
    const best = sizes.map((_, number) => Math.max(...others.map((policy) => policy.rates[number])));
    const upper = best.map((rate, number) => Math.max(rate, optimum.rates[number]));
    draw(svg, "polygon", { points: between(best, upper), fill: "var(--shade)" });
  }

  function drawInfinite(svg) {
    for (const { rate, words } of data.infinite) {
      const y = scale.y(rate);
      draw(svg, "line", {
        x1: scale.box.left, x2: scale.box.right, y1: y, y2: y, stroke: "var(--quiet)", "stroke-dasharray": "1.5 4",
      });
      draw(svg, "text", { x: scale.box.left + 4, y: y - 6 }, words);
    }
  }

  function drawPolicy(svg, policy) {
    if (policy.error) {
      const low = drawn(policy).map((rate, number) => Math.max(rate - 2 * policy.error[number], scale.bottom));
      const high = drawn(policy).map((rate, number) => Math.min(rate + 2 * policy.error[number], scale.top));
      draw(svg, "polygon", { points: between(low, high), fill: color(policy), opacity: 0.2 });
    }
    draw(svg, "polyline", {
      points: line(drawn(policy)).join(" "), fill: "none", stroke: color(policy), "stroke-width": 2.2,
      "stroke-dasharray": dash(policy), "stroke-linejoin": "round",
    });
    if (sizes.length > 12) return;
    sizes.forEach((_, number) => dot(svg, policy, number, 3));
  }

  function dot(parent, policy, number, radius) {
    dotAt(parent, policy, scale.x(sizes[number]), scale.y(drawn(policy)[number]), radius);
  }

  function dotAt(parent, policy, cx, cy, radius) {
    const stroke = { stroke: "var(--paper)", "stroke-width": radius > 3 ? 2 : 0 };
    draw(parent, "circle", { cx, cy, r: radius, fill: color(policy), ...stroke });
  }

  /** A dot, a line down to the axis, and beside this line the sentence, where it covers no curve. */
  function drawKnee(svg, knee) {
    const policy = policies[knee.line];
    if (!knee.is_drawn || hidden.has(policy)) return;
    const others = [...svg.querySelectorAll("text.strong")].map((text) => text.getBBox());
    const [x, y] = [scale.x(knee.blocks), scale.y(knee.hit_rate)];
    draw(svg, "line", { x1: x, x2: x, y1: y, y2: scale.box.bottom, stroke: color(policy), "stroke-dasharray": "1.5 3" });
    dotAt(svg, policy, x, y, 6);
    const text = draw(svg, "text", { class: "strong" });
    for (const words of [knee.words, `knee: ${short(knee.blocks)}`, "knee"]) {
      text.textContent = words;
      const found = placesBeside(x, y, text.getComputedTextLength(), others);
      if (found.length === 0) continue;
      const best = found.reduce((one, other) => (other.cost < one.cost ? other : one));
      text.setAttribute("x", best.x);
      text.setAttribute("y", best.y);
      return;
    }
    text.remove();
  }

  /** Where words of this width may stand: from the knee down, on either side; then above it. */
  function placesBeside(x, y, width, others) {
    const lows = [];
    for (let low = y + 20; low <= scale.box.bottom - 6; low += 10) lows.push(low);
    const places = [...lows, y - 10, y - 26].flatMap((low) => [x + 8, x - 8 - width].map((left) => ({ x: left, y: low })));
    const fitting = places.filter((place) => place.x >= scale.box.left && place.x + width <= scale.box.right);
    const clear = (place) => others.every((box) =>
      place.x + width < box.x || place.x > box.x + box.width || place.y + 4 < box.y || place.y - 14 > box.y + box.height);
    return fitting.filter(clear).map((place) => ({
      ...place, cost: covered(place.x, place.y - 12, place.x + width, place.y + 4),
    }));
  }

  /** How much of the curves lies in a rectangle: points of them that are close together. */
  function covered(left, top, right, bottom) {
    let count = 0;
    for (const rates of [...shown().map(drawn), ...data.infinite.map(({ rate }) => sizes.map(() => rate))])
      for (let number = 0; number < last; number += 1)
        for (let part = 0; part <= 1; part += 0.1) {
          const x = scale.x(sizes[number]) * (1 - part) + scale.x(sizes[number + 1]) * part;
          const y = scale.y(rates[number]) * (1 - part) + scale.y(rates[number + 1]) * part;
          if (x > left && x < right && y > top && y < bottom) count += 1;
        }
    return count;
  }

  // ---- the crosshair

  function show() {
    const size = sizes[state.index];
    const x = scale.x(size);
    moving.replaceChildren();
    draw(moving, "line", { x1: x, x2: x, y1: scale.box.top - 10, y2: scale.box.bottom, stroke: "var(--quiet)" });
    for (const policy of shown()) dot(moving, policy, state.index, 4.5);
    place.replaceChildren();
    make(place, "strong", `${whole(size)} block${size === 1 ? "" : "s"}`);
    const amounts = [`${whole(size * data.tokens_a_block)} tokens`];
    if (data.bytes_per_block) amounts.push(gib(size));
    make(place, "span", amounts.join(" · "));
    fillRows();
    numbers.forEach((row, number) => row.classList.toggle("here", number === state.index));
    const svg = chart.firstChild;
    svg.setAttribute("aria-valuenow", size);
    svg.setAttribute("aria-valuetext", spoken(size));
  }

  function spoken(size) {
    const named = policies.filter((policy) => !hidden.has(policy));
    return `${whole(size)} blocks: ${named.map((policy) => `${policy.name} ${percent(policy.rates[state.index])}`).join(", ")}`;
  }

  function moveTo(index) {
    state.index = Math.min(Math.max(index, 0), last);
    show();
  }

  function nearest(x) {
    let best = 0;
    sizes.forEach((size, number) => {
      if (Math.abs(scale.x(size) - x) < Math.abs(scale.x(sizes[best]) - x)) best = number;
    });
    return best;
  }

  function listen(svg) {
    const point = (event) => {
      const frame = svg.getBoundingClientRect();
      moveTo(nearest(((event.clientX - frame.left) * scale.width) / frame.width));
    };
    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerdown", point);
    svg.addEventListener("keydown", (event) => {
      const page = Math.max(1, Math.round(sizes.length / 10));
      const steps = {
        ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -page, PageUp: page, Home: -last, End: last,
      };
      if (!(event.key in steps) || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      moveTo(state.index + steps[event.key]);
    });
  }

  // ---- the names, which are switches

  const rows = policies.map((policy) => {
    const row = make(document.querySelector("#readout tbody"), "tr");
    const button = make(make(row, "td"), "button");
    button.type = "button";
    const swatch = draw(button, "svg", { viewBox: "0 0 24 10", "aria-hidden": "true" });
    draw(swatch, "line", {
      x1: 0, x2: 24, y1: 5, y2: 5, stroke: color(policy), "stroke-width": 3, "stroke-dasharray": dash(policy),
    });
    make(button, "span", policy.name);
    button.addEventListener("click", () => {
      if (!hidden.delete(policy)) hidden.add(policy);
      redraw();
    });
    return { policy, row, button, rate: make(row, "td"), gap: make(row, "td") };
  });
  document.getElementById("gap-head").hidden = !optimum;

  function fillRows() {
    const rivals = policies.filter((policy) => !policy.is_optimum && !hidden.has(policy));
    const best = Math.max(...rivals.map((policy) => policy.rates[state.index]));
    for (const { policy, row, button, rate, gap } of rows) {
      const value = policy.rates[state.index];
      const off = hidden.has(policy);
      button.setAttribute("aria-pressed", String(!off));
      row.classList.toggle("off", off);
      row.classList.toggle("best", !off && !policy.is_optimum && isOne && rivals.length > 1 && value === best);
      rate.textContent = percent(value) + (policy.error ? ` ± ${(200 * policy.error[state.index]).toFixed(1)}` : "");
      gap.hidden = !optimum;
      gap.textContent = optimum && !policy.is_optimum ? (100 * (optimum.rates[state.index] - value)).toFixed(1) : "";
    }
  }

  switchOf(["log", "linear"], (name) => { state.logarithmic = name === "log"; redraw(); });
  switchOf(["rates", "points"], (name) => { state.above = name === "points"; redraw(); });
  document.getElementById("views").hidden = !lru || !policies.some((policy) => policy !== lru && !policy.is_optimum);

  document.getElementById("picture").hidden = false;
  let width = 0;
  const resize = () => {
    if (chart.clientWidth === width) return;
    width = chart.clientWidth;
    redraw();
  };
  resize();
  new ResizeObserver(() => requestAnimationFrame(resize)).observe(chart);
})();
