// Requests to the server, with the API key; server-sent events.

let key = sessionStorage.getItem("blockyard-key") || "";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function useKey(text) {
  key = text.trim();
  sessionStorage.setItem("blockyard-key", key);
}

export async function ask(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  if (key) headers.Authorization = `Bearer ${key}`;
  const answer = await fetch(path, { ...options, headers, credentials: "same-origin", redirect: "error" });
  if (!answer.ok) throw new Refused(answer.status, await why(answer));
  return answer;
}

export const askJson = async (path) => (await ask(path)).json();

async function why(answer) {
  try {
    const { error } = await answer.json();
    return typeof error === "string" ? error : error.message;
  } catch {
    return `the server returned status ${answer.status}`;
  }
}

// Yield a response's server-sent events as [name, data]. EventSource could not send the key.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      let name = "message", data = "";
      for (const line of part.split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        else if (line.startsWith("data: ")) data += line.slice(6);
      }
      if (data) yield [name, data];
    }
  }
}
