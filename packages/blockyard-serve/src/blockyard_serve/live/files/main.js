// The page: receives frames from the server, chooses the one to show, and updates all parts.

import { Chart } from "./chart.js";
import { Chat } from "./chat.js";
import { Frames } from "./frames.js";
import { Inspector } from "./inspector.js";
import { BlockMap } from "./map.js";
import { Requests } from "./requests.js";
import { drawCell, NAMES, readColors, WORDS } from "./states.js";
import { bytes, count, make, onOneLine, share } from "./text.js";
import { Tree } from "./tree.js";
import { askJson, ask, events, useKey } from "./wire.js";

const at = (id) => document.getElementById(id);
const own = new Set();
const SAY_EACH = 20000;
let saidAt = 0;

const isPhone = () => innerWidth < 620;
const keys = { p: () => at("pause").click(), ".": () => at("step").click(), ",": () => at("back").click() };
const map = new BlockMap(at("map"), {
  height: () => (isPhone() ? 300 : Math.max(Math.min(innerHeight * 0.46, 470), 240)),
  told: (cell, isKept) => inspector.look(cell, isKept),
  key: (name) => { keys[name]?.(); return name in keys; },
});
const cpuMap = new BlockMap(at("cpu-map"), { height: () => 110, told: () => {} });
const inspector = new Inspector(at("block-title"), at("block-body"), { map, choose: (holder) => requests.keep(holder) });
const requests = new Requests(at("rows"), at("queue"), (path) => { if (path) tree.clear(); if (path || !tree.kept) map.light(path); }, own);
const tree = new Tree(at("tree"), at("tree-size"), at("tree-none"), (path) => { if (path) requests.clear(); map.light(path); },
  (block) => Math.floor((block - 1) / map.map.scale));
const chart = new Chart(at("chart"), at("time-words"), at("figures"), at("causes"));
const chat = new Chat({
  talk: at("talk"), form: at("chat-form"), question: at("question"), send: at("send"), stop: at("stop"), forget: at("forget"),
}, own);
const frames = new Frames(show, (frame) => chart.add(frame));

function show(frame, follows) {
  map.show(frame.map, frame.at, follows);
  at("cpu").hidden = !frame.cpu;
  if (frame.cpu) cpuMap.show(frame.cpu, frame.at, follows);
  writeTenants(frame.totals);
  writeTiers(frame.totals.tiers || []);
  requests.show(frame);
  chart.show(frame);
  inspector.moved(frame, frames.isHeld);
  writeLegend(frame.totals);
  writePlace(frame);
  document.body.dataset.frame = frame.n; // for tests
  if (!frames.isHeld && performance.now() - saidAt > SAY_EACH) say(summary(frame));
}

function summary({ totals, step }) {
  const held = totals.private + totals.shared + totals.pending + totals.retiring + totals.loading;
  return `Step ${count(step)}: ${count(held)} blocks in use, ${count(totals.idle)} cached and idle, ${count(totals.free)} free; ` +
    `${count(totals.running)} requests run, ${count(totals.waiting)} wait; hit rate ${share(totals.hit, totals.prompt)} since the start.`;
}

// Each tenant's blocks, in bytes if the size of a block is known.
function writeTenants({ tenants = [], bytes: each }) {
  at("tenants").hidden = tenants.length === 0;
  at("tenant-lines").replaceChildren(...tenants.map(([name, ...blocks]) => make("tr", "", "", make("td", "", onOneLine(name)),
    ...blocks.map((number) => make("td", "", each ? bytes(number * each) : count(number))))));
}

function writeTiers(lines) {
  at("tiers").hidden = lines.length === 0;
  at("tier-lines").replaceChildren(...lines.map((line) => make("li", "", line)));
}

function say(words) {
  saidAt = performance.now();
  at("said").textContent = words;
}

const entries = new Map();
function writeLegend(totals) {
  const shown = ["private", "shared", "pending", "idle", "free"].concat(totals.retiring ? ["retiring"] : [], totals.cpu ? ["loading"] : []);
  for (const name of shown) {
    if (!entries.has(name)) entries.set(name, entry(name));
    entries.get(name).number.textContent = count(totals[name]);
  }
  for (const [name, { item }] of entries) item.hidden = !shown.includes(name);
}

function entry(name) {
  const swatch = make("canvas"), number = make("b"), item = make("li", "", "", swatch, make("span", "", name), number);
  const paint = () => {
    swatch.width = swatch.height = 28;
    readColors();
    drawCell(swatch.getContext("2d"), 0, 0, 28, NAMES.indexOf(name), 2);
  };
  swatch.setAttribute("aria-hidden", "true");
  item.title = WORDS[name];
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  at("legend").append(item);
  paint();
  return { item, number };
}

function writePlace(frame) {
  const { blocks, scale } = frame.map, late = frames.latest.at - frame.at, { bytes: each } = frame.totals;
  at("size").textContent = `${count(blocks)} blocks of ${blockSize} tokens` + (each ? ` and ${bytes(each)}, ${bytes(blocks * each)} in all` : "") +
    (scale > 1 ? `; ${count(scale)} blocks per cell` : "");
  at("scrub").max = frames.list.length - 1;
  at("scrub").value = frames.place;
  const words = `step ${count(frame.step)}, ${late < 0.05 ? "now" : `${late.toFixed(1)} s ago`}`;
  at("when").textContent = words;
  at("scrub").setAttribute("aria-valuetext", words);
  at("back").disabled = frames.place <= 0;
  at("step").disabled = frames.isHeld && frames.place >= frames.list.length - 1;
}

// Playback.

function hold(isHeld) {
  frames.hold(isHeld);
  at("pause").setAttribute("aria-pressed", String(isHeld));
  at("pause").textContent = isHeld ? "Resume" : "Pause";
  status(isHeld ? "held" : "", isHeld ? "paused" : "live");
  if (frames.shown) say(isHeld ? `Paused. ${summary(frames.shown)}` : "Live.");
}

function stepBy(number) {
  if (!frames.isHeld) hold(true);
  frames.go(frames.place + number);
  if (frames.shown) say(summary(frames.shown));
}

at("pause").addEventListener("click", () => hold(!frames.isHeld));
at("step").addEventListener("click", () => stepBy(1));
at("back").addEventListener("click", () => stepBy(-1));
at("speed").addEventListener("change", (event) => {
  frames.playAt(Number(event.target.value));
  status("", frames.speed === 1 ? "live" : "slow motion");
});
at("scrub").addEventListener("input", (event) => {
  if (!frames.isHeld) hold(true);
  frames.go(Number(event.target.value));
});

// The stream, with reconnects.

let blockSize = 0;
const status = (kind, words) => { at("status").className = kind; at("status").textContent = words; };
const sleep = (seconds) => new Promise((done) => { setTimeout(done, 1000 * seconds); });

async function begin() {
  const first = await askJson("state");
  blockSize = first.block_size;
  at("model").textContent = onOneLine(first.model);
  if (first.model) document.title = `${onOneLine(first.model)}: blocks`;
  at("chat").hidden = !first.chat;
  at("prompts").hidden = !first.shows_text;
  chat.path = first.chat || "";
  chat.model = first.model;
}

async function watch() {
  await begin();
  const answer = await ask("state/stream");
  status(frames.isHeld ? "held" : "", frames.isHeld ? "paused" : "live");
  for await (const [name, data] of events(answer)) {
    const content = JSON.parse(data);
    if (name === "past") chart.past(content);
    else if (name === "tree") tree.show(content);
    else if (name === "over") return;
    else if (!frames.take(name, content)) return;
  }
}

function needsKey(error) {
  if (error.status !== 401) return false;
  at("key-form").hidden = false;
  document.querySelector("main").hidden = true;
  status("waits", "API key needed");
  at("key").focus();
  return true;
}

async function run() {
  for (let wait = 1; ; wait = Math.min(2 * wait, 15)) {
    try {
      await watch();
      wait = 1;
    } catch (error) {
      if (needsKey(error)) return;
      console.info(`the stream ended: ${error.message}`);
    }
    status("lost", "no connection; retrying");
    await sleep(wait);
  }
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(at("key").value);
  at("key").value = "";
  at("key-form").hidden = true;
  document.querySelector("main").hidden = false;
  run();
});
globalThis.blockyard = { frames, map, inspector, requests, tree, chart }; // for tests
run();
