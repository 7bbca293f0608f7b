// Untrusted text, made safe to show. It only becomes the text of a node, never markup.

const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

// Show control characters as pictures, and characters that reverse or hide text as numbers.
export function visible(text) {
  return text.replace(UNSEEN, (sign) => {
    const code = sign.charCodeAt(0);
    if (code < 32) return String.fromCharCode(0x2400 + code);
    if (code === 127) return "\u2421";
    return `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
  });
}

// Visible text on one line.
export const onOneLine = (text) => visible(text).replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5");

// Whether the server made this request name, so that it need not be shown.
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
