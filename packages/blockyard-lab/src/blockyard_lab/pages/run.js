(() => {
  const chart = document.getElementById("chart");
  const place = document.getElementById("place");
  const tables = document.querySelectorAll("section.run");
  const select = document.querySelector("#which select");
  const state = { run: data.runs[0], index: 0 };
  let scale = null;
  let moving = null;

  const seconds = (number) => `${Number(number.toPrecision(6)).toLocaleString("en-US")} s`;
  const perSecond = (values) => values.map((value) => value / state.run.span);

  /** The charts of a run, from above. A line has a value for each span; parts are stacked. */
  function panels({ held, running, waiting, counts, num_blocks, has_causes }) {
    const misses = has_causes
      ? [
          { name: "evicted", color: "var(--c1)", values: counts.evicted_tokens },
          { name: "never seen", color: "var(--faint-2)", values: counts.never_seen_tokens },
          { name: "tail", color: "var(--c3)", values: counts.tail_tokens },
        ]
      : [{ name: "missed", color: "var(--faint-2)", values: counts.prompt_tokens.map((all, n) => all - counts.hit_tokens[n]) }];
    const found = [
      { title: "blocks held", limit: num_blocks, lines: [{ name: "held", color: "var(--c0)", values: held }] },
      {
        title: "requests",
        lines: [
          { name: "running", color: "var(--c0)", values: running },
          { name: "waiting", color: "var(--c4)", values: waiting },
        ],
      },
      {
        title: "prompt tokens per second, when requests start",
        parts: [{ name: "hit", color: "var(--c2)", values: counts.hit_tokens }, ...misses].map((part) => ({
          ...part, values: perSecond(part.values),
        })),
      },
      { title: "preemptions", parts: [{ name: "preempted", color: "var(--c6)", values: counts.preempted }] },
    ];
    if (counts.moved_blocks.some((value) => value > 0))
      found.push({
        title: "blocks moved to and from the CPU per second",
        parts: [{ name: "moved", color: "var(--c5)", values: perSecond(counts.moved_blocks) }],
      });
    return found;
  }

  function topOf(panel) {
    const sums = state.run.held.map((_, number) => (panel.parts ?? []).reduce((sum, part) => sum + part.values[number], 0));
    const highest = Math.max(panel.limit ?? 0, ...sums, ...(panel.lines ?? []).flatMap((line) => line.values));
    return Math.max(highest * 1.06, 1e-9);
  }

  function redraw() {
    const width = Math.max(chart.clientWidth, 260);
    const found = panels(state.run);
    const each = Math.round(Math.min(Math.max(width * 0.16, 96), Math.max(130, innerHeight * 0.16)));
    const height = found.length * (each + 30) + 44;
    const end = state.run.held.length;
    scale = { width, left: 54, right: width - 14, end };
    scale.x = (number) => scale.left + (number / end) * (scale.right - scale.left);
    chart.replaceChildren();
    const svg = draw(chart, "svg", {
      viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "slider", "aria-label": "Time", "aria-valuemin": 0, "aria-valuemax": end - 1,
    });
    found.forEach((panel, number) => drawPanel(svg, panel, 26 + number * (each + 30), each));
    drawTime(svg, height - 40);
    scale.top = 26;
    scale.bottom = height - 40;
    moving = draw(svg, "g", { "pointer-events": "none" });
    listen(svg);
    show();
  }

  function drawPanel(svg, panel, top, height) {
    const bottom = top + height - 6;
    const most = topOf(panel);
    const y = (value) => bottom - (value / most) * (bottom - top - 4);
    for (const tick of roundTicks(0, most, 3)) {
      draw(svg, "line", { x1: scale.left, x2: scale.right, y1: y(tick), y2: y(tick), stroke: "var(--faint)" });
      draw(svg, "text", { x: scale.left - 8, y: y(tick) + 4, "text-anchor": "end" }, short(tick));
    }
    draw(svg, "text", { x: scale.left, y: top - 6, class: "strong" }, panel.title);
    const lower = state.run.held.map(() => 0);
    for (const part of panel.parts ?? []) drawPart(svg, part, lower, y);
    for (const line of panel.lines ?? []) drawLine(svg, line, y);
    if (panel.limit)
      draw(svg, "line", { x1: scale.left, x2: scale.right, y1: y(panel.limit), y2: y(panel.limit), stroke: "var(--quiet)", "stroke-dasharray": "5 4" });
  }

  /** The corners of steps: a value holds for its whole span. */
  const steps = (values, y) => values.flatMap((value, n) => [n, n + 1].map((edge) => `${scale.x(edge).toFixed(2)},${y(value).toFixed(2)}`));

  function drawPart(svg, part, lower, y) {
    if (!part.values.some((value) => value > 0)) return;
    const upper = lower.map((value, number) => value + part.values[number]);
    draw(svg, "polygon", { points: [...steps(upper, y), ...steps(lower, y).reverse()].join(" "), fill: part.color });
    upper.forEach((value, number) => { lower[number] = value; });
  }

  function drawLine(svg, line, y) {
    draw(svg, "polyline", { points: steps(line.values, y).join(" "), fill: "none", stroke: line.color, "stroke-width": 1.8 });
  }

  function drawTime(svg, y) {
    draw(svg, "line", { x1: scale.left, x2: scale.right, y1: y, y2: y, stroke: "var(--quiet)" });
    const most = scale.end * state.run.span;
    for (const tick of roundTicks(0, most, Math.max(3, (scale.right - scale.left) / 80))) {
      const x = scale.x(tick / state.run.span);
      const anchor = x > scale.width - 24 ? "end" : "middle";
      draw(svg, "line", { x1: x, x2: x, y1: y, y2: y + 5, stroke: "var(--quiet)" });
      draw(svg, "text", { x: anchor === "end" ? x + 12 : x, y: y + 18, "text-anchor": anchor }, short(tick));
    }
    draw(svg, "text", { x: (scale.left + scale.right) / 2, y: y + 34, "text-anchor": "middle" }, "seconds since the trace began");
  }

  function show() {
    const x = scale.x(state.index + 0.5);
    moving.replaceChildren();
    draw(moving, "line", { x1: x, x2: x, y1: scale.top, y2: scale.bottom, stroke: "var(--quiet)" });
    place.replaceChildren();
    make(place, "strong", seconds(state.index * state.run.span));
    make(place, "span", `to ${seconds((state.index + 1) * state.run.span)}`);
    const body = document.querySelector("#readout tbody");
    body.replaceChildren();
    for (const panel of panels(state.run)) {
      const heading = make(make(body, "tr"), "th", panel.title);
      heading.colSpan = 2;
      for (const one of [...(panel.lines ?? []), ...(panel.parts ?? [])]) addRow(body, one);
    }
    shownTable().querySelectorAll("tbody tr").forEach((row, number) => row.classList.toggle("here", number === state.index));
    const svg = chart.firstChild;
    svg.setAttribute("aria-valuenow", state.index);
    svg.setAttribute("aria-valuetext", `${seconds(state.index * state.run.span)}: ${body.textContent}`);
  }

  function addRow(body, one) {
    const row = make(body, "tr");
    const name = make(row, "td");
    const swatch = draw(name, "svg", { viewBox: "0 0 12 10", "aria-hidden": "true" });
    draw(swatch, "rect", { width: 12, height: 10, rx: 2, fill: one.color });
    make(name, "span", ` ${one.name}`);
    make(row, "td", whole(one.values[state.index]));
  }

  const shownTable = () => tables[data.runs.indexOf(state.run)];

  function moveTo(index) {
    state.index = Math.min(Math.max(index, 0), scale.end - 1);
    show();
  }

  function listen(svg) {
    const point = (event) => {
      const frame = svg.getBoundingClientRect();
      const x = ((event.clientX - frame.left) * scale.width) / frame.width;
      moveTo(Math.floor(((x - scale.left) / (scale.right - scale.left)) * scale.end));
    };
    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerdown", point);
    svg.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -24, PageUp: 24, Home: -scale.end, End: scale.end };
      if (!(event.key in steps) || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      moveTo(state.index + steps[event.key]);
    });
  }

  function choose(number) {
    state.run = data.runs[number];
    state.index = state.run.held.indexOf(Math.max(...state.run.held));
    tables.forEach((table, other) => { table.hidden = other !== number; });
    redraw();
  }

  data.runs.forEach((run, number) => { make(select, "option", run.name).value = number; });
  select.addEventListener("change", () => choose(Number(select.value)));
  document.getElementById("which").hidden = data.runs.length < 2;
  document.getElementById("picture").hidden = false;
  choose(0);
  let width = chart.clientWidth;
  const resize = () => {
    if (chart.clientWidth === width) return;
    width = chart.clientWidth;
    redraw();
  };
  new ResizeObserver(() => requestAnimationFrame(resize)).observe(chart);
})();
