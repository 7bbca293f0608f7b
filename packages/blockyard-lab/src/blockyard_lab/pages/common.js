"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const whole = (number) => number.toLocaleString("en-US", { maximumFractionDigits: 0 });
const short = (number) => {
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (number >= unit * 0.9999) return Number((number / unit).toPrecision(4)) + letter;
  return String(Number(number.toPrecision(4)));
};
const minus = (text) => text.replace("-", "\u2212");

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

function roundTicks(low, high, wanted) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999) * power;
  const first = Math.ceil(low / step - 1e-9);
  const count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: count }, (_, number) => (first + number) * step);
}

/** Two buttons of which one is pressed. */
function switchOf(names, choose) {
  for (const name of names)
    document.getElementById(name).addEventListener("click", () => {
      choose(name);
      for (const other of names) document.getElementById(other).setAttribute("aria-pressed", String(other === name));
    });
}

