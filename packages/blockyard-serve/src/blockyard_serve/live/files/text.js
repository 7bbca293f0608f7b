// Text that others wrote, made safe to look at: it only ever becomes the text of a node, never markup.

const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

// Control characters as their pictures, and those that turn or hide text by their numbers.
export function visible(text) {
  return text.replace(UNSEEN, (sign) => {
    const code = sign.charCodeAt(0);
    if (code < 32) return String.fromCharCode(0x2400 + code);
    if (code === 127) return "\u2421";
    return `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
  });
}

// The same on one line, as a token is shown.
export const onOneLine = (text) => visible(text).replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5");

// A name of a request that the server made, and of no interest.
export const isMade = (name) => /^req-[0-9a-f]{24}$/.test(name);

export function make(tag, className = "", text = "", ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text) node.textContent = text;
  node.append(...children);
  return node;
}

export const count = (number) => Math.round(number).toLocaleString("en-US");
export const bytes = (number) => {
  const power = Math.min(Math.floor(Math.log2(Math.max(number, 1)) / 10), 4), size = number / 1024 ** power;
  return `${size.toFixed(size < 10 && power ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
};
export const share = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(part && part < whole / 10 ? 1 : 0)} %` : "\u2013");
export const times = (number, one, many) => `${count(number)} ${number === 1 ? one : many}`;
