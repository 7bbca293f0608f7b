"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { sizes, policies } = data;
  const last = sizes.length - 1;
  const dashes = ["", "9 4", "2.5 3", "10 4 2.5 4"];
  const optimum = policies.find((policy) => policy.is_optimum);
  const hidden = new Set();
  const chart = document.getElementById("chart");
  const place = document.getElementById("place");
  const numbers = document.querySelectorAll("#numbers tbody tr");
  const state = { logarithmic: true, index: data.knee };
  let scale = null;
  let moving = null;

  const whole = (number) => number.toLocaleString("en-US", { maximumFractionDigits: 0 });
  const percent = (rate) => `${(100 * rate).toFixed(1)} %`;
  const short = (number) => {
    for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (number >= unit * 0.9999) return Number((number / unit).toPrecision(4)) + letter;
    return String(Number(number.toPrecision(4)));
  };
  const gib = (blocks) => {
    const amount = (blocks * data.bytes_per_block) / 2 ** 30;
    return `${amount.toLocaleString("en-US", { maximumSignificantDigits: amount < 1000 ? 3 : 6 })} GiB`;
  };
  const color = (policy) => (policy.style < 0 ? "var(--ink)" : `var(--c${policy.style % 6})`);
  const dash = (policy) => (policy.style < 0 ? "7 4" : dashes[Math.floor(policy.style / 6) % dashes.length]);

  function draw(parent, tag, attributes, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  }

  function make(parent, tag, text) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  }

  // ---- scales

  function highest() {
    const rates = policies.flatMap((policy) => policy.rates);
    const top = Math.max(data.infinite, ...rates);
    return top < 1e-5 ? 0.01 : Math.min(top * 1.16, 1.1);
  }

  function measure(width) {
    const height = Math.round(Math.min(Math.max(width * 0.58, 280), 480));
    const box = { left: 46, right: width - 12, top: 52, bottom: height - 42 };
    const high = sizes[last];
    const spread = high >= 1.5 * sizes[0];
    const low = state.logarithmic ? (spread ? sizes[0] : high / 10) : 0;
    const part = state.logarithmic
      ? (size) => Math.log(size / low) / Math.log(high / low)
      : (size) => size / high;
    const top = highest();
    return {
      width, height, box, low, high, top,
      x: (size) => box.left + part(size) * (box.right - box.left),
      y: (rate) => box.bottom - (rate / top) * (box.bottom - box.top),
    };
  }

  function roundTicks(high, wanted) {
    const rough = high / wanted;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999) * power;
    return Array.from({ length: Math.floor(high / step + 1e-9) + 1 }, (_, number) => number * step);
  }

  function logTicks(low, high, wanted) {
    const decades = Math.log10(high / low);
    const factors = decades < 2.2 ? [1, 2, 5] : [1];
    const every = Math.max(1, Math.ceil(decades / wanted));
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high) + 1e-9; power += 1)
      if (factors.length > 1 || power % every === 0) found.push(...factors.map((factor) => factor * 10 ** power));
    return found.filter((tick) => tick >= low * 0.9999 && tick <= high * 1.0001);
  }

  function ticks(factor) {
    const wanted = Math.max(3, Math.floor((scale.box.right - scale.box.left) / 74));
    const [low, high] = [scale.low * factor, scale.high * factor];
    return state.logarithmic ? logTicks(low, high, wanted) : roundTicks(high, wanted);
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
    drawGap(svg);
    drawInfinite(svg);
    for (const policy of policies) if (!hidden.has(policy)) drawPolicy(svg, policy);
    drawKnee(svg);
    moving = draw(svg, "g", { "pointer-events": "none" });
    listen(svg);
    show();
  }

  function drawAxes(svg) {
    const { box, x, y } = scale;
    for (const rate of roundTicks(scale.top * 100, 6)) {
      draw(svg, "line", { x1: box.left, x2: box.right, y1: y(rate / 100), y2: y(rate / 100), stroke: "var(--faint)" });
      const label = `${Number(rate.toPrecision(6))} %`;
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
    const y = scale.y(data.infinite);
    draw(svg, "line", {
      x1: scale.box.left, x2: scale.box.right, y1: y, y2: y, stroke: "var(--quiet)", "stroke-dasharray": "1.5 4",
    });
    const text = draw(svg, "text", { x: scale.box.left + 4, y: y - 6 }, data.infinite_words);
    scale.free = scale.box.left + text.getComputedTextLength() + 16;
  }

  function drawPolicy(svg, policy) {
    if (policy.error) {
      const low = policy.rates.map((rate, number) => Math.max(rate - 2 * policy.error[number], 0));
      const high = policy.rates.map((rate, number) => Math.min(rate + 2 * policy.error[number], 1));
      draw(svg, "polygon", { points: between(low, high), fill: color(policy), opacity: 0.2 });
    }
    draw(svg, "polyline", {
      points: line(policy.rates).join(" "), fill: "none", stroke: color(policy), "stroke-width": 2.2,
      "stroke-dasharray": dash(policy), "stroke-linejoin": "round",
    });
    if (sizes.length > 12) return;
    policy.rates.forEach((rate, number) => dot(svg, policy, number, 3));
  }

  function dot(parent, policy, number, radius) {
    const [cx, cy] = [scale.x(sizes[number]), scale.y(policy.rates[number])];
    const stroke = { stroke: "var(--paper)", "stroke-width": radius > 3 ? 2 : 0 };
    draw(parent, "circle", { cx, cy, r: radius, fill: color(policy), ...stroke });
  }

  /** The sentence stands below to the right, or above to the left; where neither has room, one word must do. */
  function drawKnee(svg) {
    const policy = policies[data.knee_policy];
    if (hidden.has(policy)) return;
    dot(svg, policy, data.knee, 6);
    const [x, y] = [scale.x(sizes[data.knee]), scale.y(policy.rates[data.knee])];
    const text = draw(svg, "text", { class: "strong" }, data.knee_words);
    const fits = (width) => (x + 8 + width <= scale.box.right ? 1 : x - 8 - width >= scale.box.left ? -1 : 0);
    let side = fits(text.getComputedTextLength());
    if (side === 0) {
      text.textContent = "knee";
      side = fits(text.getComputedTextLength());
    }
    const low = y > scale.box.bottom - 30;
    const lift = x - 8 - text.getComputedTextLength() < scale.free ? 26 : 10; // over the words at the infinite cache
    text.setAttribute("x", x + 8 * side);
    text.setAttribute("text-anchor", side < 0 ? "end" : "start");
    text.setAttribute("y", side < 0 ? Math.min(y, scale.y(data.infinite)) - lift : low ? y - 26 : y + 26);
  }

  // ---- the crosshair

  function show() {
    const size = sizes[state.index];
    const x = scale.x(size);
    moving.replaceChildren();
    draw(moving, "line", { x1: x, x2: x, y1: scale.box.top - 10, y2: scale.box.bottom, stroke: "var(--quiet)" });
    for (const policy of policies) if (!hidden.has(policy)) dot(moving, policy, state.index, 4.5);
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
    const shown = policies.filter((policy) => !hidden.has(policy));
    return `${whole(size)} blocks: ${shown.map((policy) => `${policy.name} ${percent(policy.rates[state.index])}`).join(", ")}`;
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
      row.classList.toggle("best", !off && !policy.is_optimum && rivals.length > 1 && value === best);
      rate.textContent = percent(value) + (policy.error ? ` ± ${(200 * policy.error[state.index]).toFixed(1)}` : "");
      gap.hidden = !optimum;
      gap.textContent = optimum && !policy.is_optimum ? (100 * (optimum.rates[state.index] - value)).toFixed(1) : "";
    }
  }

  for (const name of ["log", "linear"])
    document.getElementById(name).addEventListener("click", () => {
      state.logarithmic = name === "log";
      for (const other of ["log", "linear"])
        document.getElementById(other).setAttribute("aria-pressed", String(other === name));
      redraw();
    });

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
