// The conversation: questions, answers as they come, and what went wrong with them.
// Whatever the model writes goes into text nodes: it can't become HTML.

import { greet } from "./greeting.js";
import { h } from "./parts.js";
import { ask, events } from "./server.js";

const NEAR = 40; // pixels from the end, within which the list follows what comes

/** A block for text that grows; it isn't shown before there is some. */
function growing(element, outer = element) {
  const node = document.createTextNode("");
  element.append(node);
  outer.hidden = true;
  return {
    outer,
    add(text) {
      node.appendData(text);
      outer.hidden = false;
    },
    get text() {
      return node.data;
    },
  };
}

/** What became of an answer, in words. */
function told(turn) {
  const { usage, finish, seconds } = turn;
  const words = [];
  if (finish === "length") words.push("No room is left for more tokens.");
  if (usage) {
    const found = usage.prompt_tokens_details.cached_tokens;
    const thought = usage.completion_tokens_details.reasoning_tokens;
    words.push(
      `${usage.completion_tokens} tokens, ${thought} of them reasoning, in ` +
        `${seconds.toFixed(1)} s; ${found} of the prompt's ${usage.prompt_tokens} were ` +
        "in the cache.",
    );
  }
  return words.join(" ");
}

/**
 * The chat with `model` in the page's elements. `changed` is called when a turn begins or ends, with
 * what is known of it: its question, said (so far), finish (its reason) and usage.
 * `refused` is called when the key is no longer right.
 */
export function chat(model, changed, refused) {
  const list = document.getElementById("turns");
  const greeting = document.getElementById("greeting");
  const form = document.getElementById("composer");
  const ids = ["question", "effort", "send", "stop", "clear"];
  const [question, effort, send, stop, clear] = ids.map((id) => document.getElementById(id));
  let messages = []; // what the model is told of the turns so far
  let running = null; // what ends the turn under way

  function follow(change) {
    const near = list.scrollHeight - list.scrollTop - list.clientHeight < NEAR;
    change();
    if (near) list.scrollTop = list.scrollHeight;
  }

  function busy(controller) {
    running = controller;
    list.setAttribute("aria-busy", Boolean(controller)); // read aloud once it is whole
    send.hidden = clear.hidden = Boolean(controller);
    stop.hidden = !controller;
  }

  /** A question's elements and its answer's, and the turn that fills these. */
  function begin(text) {
    const thought = h("div", { class: "text" });
    const before = [...list.querySelectorAll("details")].at(-1);
    const open = before?.open ?? true; // as the reader has left the one before
    const reasoning = h("details", { open }, h("summary", {}, "Reasoning"), thought);
    const answer = h("div", { class: "text" });
    const calls = h("div");
    const note = h("p", { class: "note" });
    const item = h("li", { class: "answer" }, reasoning, answer, calls, note);
    greeting.hidden = true;
    follow(() => list.append(h("li", { class: "question text" }, text), item));
    return {
      question: text,
      get said() {
        return said(this);
      },
      finish: null,
      usage: null,
      started: performance.now(),
      item,
      note,
      reasoning: growing(thought, reasoning),
      content: growing(answer),
      calls: [],
      callList: calls,
    };
  }

  /** One of a turn's tool calls; nobody here can run it, so that it is shown as text. */
  function callOf(turn, { index, function: called }) {
    if (!turn.calls[index]) {
      const block = h("pre", {});
      turn.callList.append(h("div", { class: "call" }, h("b", {}, called.name), block));
      turn.calls[index] = growing(block);
    }
    return turn.calls[index];
  }

  /** All that an answer says so far, its reasoning first. */
  function said({ reasoning, content, calls }) {
    const blocks = [reasoning, content, ...calls];
    return blocks.map((block) => block?.text).filter(Boolean).join("\n");
  }

  function take(turn, event) {
    if (event.error) throw new Error(event.error.message);
    turn.usage = event.usage ?? turn.usage;
    const [choice] = event.choices;
    if (!choice) return;
    turn.finish = choice.finish_reason ?? turn.finish;
    const { reasoning, content, tool_calls: calls = [] } = choice.delta;
    follow(() => {
      const parts = [
        [turn.reasoning, reasoning],
        [turn.content, content],
        ...calls.map((call) => [callOf(turn, call), call.function.arguments]),
      ];
      for (const [block, text] of parts) {
        if (text) block.add(text);
      }
    });
  }

  /** Ask for the next turn and show it as it comes. */
  async function answer(text) {
    const controller = new AbortController();
    busy(controller);
    const turn = begin(text);
    changed(turn);
    const asked = { role: "user", content: text };
    let words = "";
    try {
      const body = {
        messages: [...messages, asked],
        reasoning_effort: effort.value,
        stream: true,
        stream_options: { include_usage: true },
      };
      const { signal } = controller;
      const response = await ask("v1/chat/completions", { body, signal });
      for await (const event of events(response)) take(turn, event);
      turn.seconds = (performance.now() - turn.started) / 1000;
      words = told(turn);
    } catch (error) {
      turn.finish = error.name === "AbortError" ? "stopped" : "error";
      words = turn.finish === "stopped" ? "Stopped." : error.message;
      if (error.status === 401) refused();
    }
    finish(turn, asked, words);
  }

  function finish(turn, asked, words) {
    follow(() => (turn.note.textContent = words));
    if (turn.finish === "error") {
      turn.note.setAttribute("role", "alert");
      turn.item.classList.add("failed");
    }
    // The reasoning belongs to its turn; of later ones the model is told the content.
    const content = turn.content.text;
    if (content) messages.push(asked, { role: "assistant", content });
    else if (!turn.said && !question.value) question.value = turn.question;
    busy(null);
    changed(turn);
    question.focus();
  }

  function submit(text) {
    if (!text || running) return;
    question.value = "";
    answer(text);
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    submit(question.value.trim());
  });
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit(question.value.trim());
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  stop.addEventListener("click", () => running?.abort());
  clear.addEventListener("click", () => {
    messages = [];
    list.replaceChildren();
    greeting.hidden = false;
    question.focus();
  });
  greet(greeting, model, submit);
}
