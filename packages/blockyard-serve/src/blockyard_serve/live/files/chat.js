// The chat box, an ordinary client of the server; the rest of the page only reads.

import { make, times, visible } from "./text.js";
import { ask, askJson, events } from "./wire.js";

const MAX_TOKENS = 160;

export class Chat {
  // own: a set to which it adds the names of its requests.
  constructor({ talk, form, question, send, stop, forget }, own) {
    Object.assign(this, { talk, question, send, stop, own });
    this.turns = [];
    this.path = "";
    this.model = "";
    form.addEventListener("submit", (event) => { event.preventDefault(); this.ask(); });
    question.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.ask(); }
    });
    stop.addEventListener("click", () => this.leaving?.abort());
    forget.addEventListener("click", () => { this.leaving?.abort(); this.turns = []; talk.replaceChildren(); question.focus(); });
  }

  say(kind, text) {
    const turn = make("p", `turn ${kind}`, visible(text));
    turn.dir = "auto";
    this.talk.append(turn);
    this.talk.scrollTop = this.talk.scrollHeight;
    return turn;
  }

  async ask() {
    const content = this.question.value;
    if (!content.trim() || this.leaving) return;
    this.question.value = "";
    this.turns.push({ role: "user", content });
    this.say("user", content);
    this.leaving = new AbortController();
    this.busy(true);
    const turns = this.turns;
    try {
      const answer = await this.read(turns);
      turns.push({ role: "assistant", content: answer });
    } catch (error) {
      if (error.name !== "AbortError") this.say("error", error.message);
      turns.pop();
    } finally {
      this.leaving = null;
      this.busy(false);
    }
  }

  async read(turns) {
    const name = `page-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
    this.own.add(name);
    this.maxTokens ??= await this.askMaxTokens();
    const body = JSON.stringify({
      model: this.model, messages: turns, stream: true, max_tokens: this.maxTokens, stream_options: { include_usage: true },
    });
    const headers = { "Content-Type": "application/json", "X-Request-ID": name };
    const answer = await ask(this.path, { method: "POST", body, headers, signal: this.leaving.signal });
    let text = "", usage = null;
    const turn = this.say("assistant", "\u2026");
    for await (const [, data] of events(answer)) {
      if (data === "[DONE]") break;
      const piece = JSON.parse(data);
      if (piece.error) throw new Error(piece.error.message);
      text += piece.choices?.[0]?.delta?.content || "";
      usage = piece.usage || usage;
      turn.textContent = visible(text) || "\u2026";
      this.talk.scrollTop = this.talk.scrollHeight;
    }
    if (usage) this.tellUse(usage);
    return text;
  }

  // A quarter of a short context, so that several turns fit.
  async askMaxTokens() {
    const { data } = await askJson(this.path.replace("chat/completions", "models"));
    return Math.max(Math.min(MAX_TOKENS, Math.floor((data[0].max_model_len || 4 * MAX_TOKENS) / 4)), 1);
  }

  tellUse(usage) {
    const hit = usage.prompt_tokens_details?.cached_tokens || 0;
    const words = `${hit} of ${times(usage.prompt_tokens, "prompt token", "prompt tokens")} came from the cache`;
    this.talk.append(make("p", "used", words));
    this.talk.scrollTop = this.talk.scrollHeight;
  }

  busy(isBusy) {
    this.send.disabled = isBusy;
    this.stop.hidden = !isBusy;
  }
}
