// A fleet: its replicas and latest routing decisions, read every second.

import { count, make, onOneLine, share, times } from "./text.js";
import { askJson, Refused, useKey } from "./wire.js";

const SECONDS = 1;
const at = (name) => document.getElementById(name);
const open = new Set();

function table(node, heads, rows) {
  const head = make("tr", "", "", ...heads.map((text) => make("th", "", text)));
  node.replaceChildren(make("thead", "", "", head), make("tbody", "", "", ...rows));
}

const cells = (values) => values.map((value) => make("td", "", String(value)));

function replicaRow(replica, claims) {
  const trust = make("td", `trust${replica.is_believed ? " believed" : ""}`, replica.trust);
  const age = replica.silence === null ? "–" : `${replica.silence.toFixed(1)} s`;
  const load = [replica.requests, replica.uncached, replica.held].map(count);
  const truth = claims
    ? [count(claims.claimed), count(claims.true), share(claims.exact, claims.requests), count(claims.requests)]
    : ["0", "0", "–", "0"];
  const row = make("tr", "", "", make("td", "", replica.prefill ? `${replica.name} (prefill)` : replica.name), trust, ...cells([age, ...load, ...truth, count(replica.lost)]));
  return row;
}

const REPLICA_HEADS = ["replica", "trust", "last message", "requests", "to compute", "held", "claimed", "true", "exact", "completed", "lost"];
const TENANT_HEADS = ["held", "idle", "retained", "floor", "share"];
const TENANT_TITLES = ["tenant", "held", "idle", "retained", "guarantee", "quota"];
const WHY_HEADS = ["candidate", "cost", "cached", "on GPU", "in flight", "requests", "to compute", "held"];

function whyRow(why, choice) {
  const numbers = [why.num_tokens, why.num_gpu_tokens, why.coming, why.requests, why.uncached, why.held].map(count);
  const cost = why.cost === null ? "∞" : why.cost.toPrecision(4);
  const name = why.is_believed ? why.replica : `${why.replica} (not trusted)`;
  return make("tr", why.replica === choice.replica ? "taken" : "", "", ...cells([name, cost, ...numbers]));
}

function choiceItem(choice) {
  const why = make("table");
  table(why, WHY_HEADS, choice.why.map((each) => whyRow(each, choice)));
  const said = `${onOneLine(choice.request)} → ${choice.replica || "none"}, ${times(choice.claimed, "cached token", "cached tokens")}`;
  const details = make("details", "", "", make("summary", "", said), make("div", "scrolls", "", why));
  if (choice.problem) details.append(make("p", "hint", onOneLine(choice.problem)));
  const key = `${choice.request} ${choice.replica}`;
  details.open = open.has(key);
  details.addEventListener("toggle", () => (details.open ? open.add(key) : open.delete(key)));
  return make("li", "", "", details);
}

function drawTenants(tenants) {
  at("tenants").hidden = tenants.length === 0;
  const row = ({ name, ...blocks }) => make("tr", "", "", make("td", "", onOneLine(name)), ...cells(TENANT_HEADS.map((head) => count(blocks[head]))));
  table(at("tenant-lines"), TENANT_TITLES, tenants.map(row));
}

function draw(state) {
  at("model").textContent = state.model;
  drawTenants(state.tenants);
  const rows = state.replicas.map((each) => replicaRow(each, state.claims[each.name]));
  table(at("replicas"), REPLICA_HEADS, rows);
  const lost = times(state.lost_attempts, "request lost its replica", "requests lost their replica");
  at("totals").textContent = `${lost}, ${count(state.resumed_requests)} resumed on another after ${times(state.resumed_tokens, "token", "tokens")}`;
  // Do not replace the list while one of its entries is open.
  if (!open.size) at("choices").replaceChildren(...state.choices.map(choiceItem));
}

function status(kind, text) {
  at("status").className = kind;
  at("status").textContent = text;
}

async function watch() {
  try {
    draw(await askJson("../fleet"));
    status("", "live");
  } catch (error) {
    if (error instanceof Refused && error.status === 401) {
      at("key-form").hidden = false;
      status("waits", "API key needed");
      return;
    }
    status("lost", "the server does not answer");
  }
  setTimeout(watch, 1000 * SECONDS);
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(at("key").value);
  at("key").value = "";
  at("key-form").hidden = true;
  watch();
});

watch();
