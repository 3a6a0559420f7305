// What an empty chat says: what can be asked, and examples to click.

import { button, h } from "./parts.js";

const EMBEDDED = "simplellm"; // the name of the model that comes with the package
const LEARNED = {
  about:
    "This is the small model that comes with SimpleLLM. It has learned a few things: " +
    "sums and differences of numbers up to 999, counting, reversing and sorting, and " +
    "the terms of the course. Beyond them it's wrong, or says so.",
  examples: [
    "What is 47 + 85?",
    "How many r are in strawberry?",
    "Sort these numbers: 31, 4, 15, 9",
    "What is a KV cache?",
    "What can you do?",
  ],
};
const ANY = {
  about: "Ask anything. Beside the answer you see the engine at work.",
  examples: [
    "Explain in three sentences what a KV cache is.",
    "Write a haiku about waiting in a queue.",
    "What is 47 + 85?",
  ],
};

/** Fill `el` for a model of this name; `choose` is given the example that is clicked. */
export function greet(el, model, choose) {
  const { about, examples } = model === EMBEDDED ? LEARNED : ANY;
  const buttons = examples.map((text) => button(text, () => choose(text)));
  el.replaceChildren(h("p", {}, about), h("div", { class: "examples" }, ...buttons));
}
