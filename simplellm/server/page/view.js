// The engine as it is drawn, in the course's widget and on the server's page: a row for
// each request, and a leaf for each page of the cache in its owners' colors.

import { COLORS, h } from "./parts.js";

/** Who holds each page: its number, group of layers, place in the table, and owners. */
export function owners({ num_pages, tables, cached }) {
  const empty = (_, page) => ({ page, owners: [], kept: false });
  const pages = Array.from({ length: num_pages }, empty);
  for (const page of cached) pages[page].kept = true;
  for (const [number, groups] of Object.entries(tables)) {
    groups.forEach((table, group) => {
      // A table is a list, or an object with some of its places.
      for (const [index, page] of Object.entries(table)) {
        if (page < 0) continue; // behind the window
        pages[page].owners.push(Number(number));
        Object.assign(pages[page], { group, index: Number(index) });
      }
    });
  }
  return pages;
}

/** A request's name on the screen. */
export function letter(number) {
  return String.fromCharCode(65 + number);
}

/** Where each request is in a snapshot, by its number. */
export function places({ running, waiting }) {
  const entry = (state) => (request) => [request.request_id, { state, ...request }];
  return new Map([...running.map(entry("running")), ...waiting.map(entry("waiting"))]);
}

// Lighter than in the figures, so that letters on it can be read.
function color(number) {
  return `color-mix(in srgb, ${COLORS[number % COLORS.length]} 78%, white)`;
}

function stripes(numbers) {
  const share = 100 / numbers.length;
  const stops = numbers.map((n, at) => `${color(n)} ${at * share}% ${(at + 1) * share}%`);
  return `linear-gradient(135deg, ${stops.join(", ")})`;
}

/** Text whose control tokens stand back. */
function spoken(text) {
  const parts = text.split(/(<\|[^|]*\|>)/).filter(Boolean);
  return parts.map((part) => (part.startsWith("<|") ? h("small", {}, part) : part));
}

/** Which part of a request's row is what: shares of the longest request's tokens. */
function bar(number, { prompt, output, computed }, found, longest) {
  const cached = Math.min(found, computed);
  const done = Math.min(computed, prompt + output);
  const part = (kind, tokens) =>
    h("i", { class: kind, style: `width: ${(100 * tokens) / longest}%` });
  return h(
    "span",
    { class: "bar", style: `--fill: ${color(number)}`, "aria-hidden": "true" },
    part("cached", cached),
    part("done", done - cached),
    part("todo", prompt + output - done),
  );
}

function row({ number, kind, fate, now, found, asked, said }, longest) {
  const facts = [
    fate,
    found && `${found} tokens found`,
    now?.preemptions && `gave way ${now.preemptions} times`.replace("1 times", "once"),
  ].filter(Boolean);
  return h(
    "li",
    { class: kind },
    h("b", { class: "chip", style: `--fill: ${color(number)}` }, letter(number)),
    h("span", { class: "fate" }, facts.join(" · ")),
    now ? bar(number, now, found, longest) : h("span", { class: "bar" }),
    h("span", { class: "asked" }, asked),
    h("span", { class: "said" }, ...spoken(said)),
  );
}

function leaf({ page, owners, kept, group, index }, pageSize) {
  const letters = owners.map(letter);
  const short = letters.length > 3 ? `${letters[0]}+${letters.length - 1}` : letters.join("");
  const classes = ["leaf", group === 1 && "sliding", kept && "kept"];
  const held = owners.length;
  const style = held ? `--fill: ${stripes(owners)}` : "";
  const where = `tokens from ${index * pageSize} on, held by ${letters.join(", ")}`;
  const title = `page ${page}: ${held ? where : kept ? "kept" : "empty"}`;
  return h("span", { class: classes.filter(Boolean).join(" "), style, title }, short);
}

/**
 * An empty picture of the engine: its `element`, and `draw`, which is given
 *
 * - `requests`, each with its number, kind (a class of style.css), fate (in words), now
 *   (its entry in a snapshot, if it ever was in one), found (prompt tokens that the cache
 *   had), asked and said (texts), and `longest`, the tokens of a full bar;
 * - `pages` as `owners` finds them, all or some, and `pageSize`;
 * - `words` that say what the pages show, and `past`, whether that is over;
 * - `facts`: of each a name, a value and, if there is more to say, a sentence.
 *
 * `heldOnly`: pages that nobody holds aren't drawn, and the legend doesn't explain them.
 */
export function picture({ heldOnly = false } = {}) {
  const rows = h("ol", { class: "requests" });
  const grid = h("div", { class: "pool", role: "img" });
  const list = h("dl", { class: "facts" });
  const sign = (text, kind, fill) => {
    const style = fill ? `--fill: ${fill}` : false;
    return h("span", { class: "sign" }, h("i", { class: `leaf ${kind}`, style }), text);
  };
  const legend = h(
    "p",
    { class: "legend" },
    sign("full layers", "", color(4)),
    sign("sliding layers", "sliding", color(4)),
    sign("shared", "", stripes([4, 5])),
    ...(heldOnly ? [] : [sign("kept to be found", "kept"), sign("empty", "")]),
  );
  const side = h("div", { class: "side" }, grid, legend, list);
  const fact = ([name, value, title = false]) =>
    h("div", { title }, h("dt", {}, name), h("dd", {}, `${value}`));
  return {
    element: h("div", { class: "halves" }, rows, side),
    draw({ requests, longest, pages, pageSize, words, past = false, facts }) {
      rows.replaceChildren(...requests.map((request) => row(request, longest)));
      for (const said of rows.querySelectorAll(".said")) said.scrollTop = said.scrollHeight;
      grid.replaceChildren(...pages.map((page) => leaf(page, pageSize)));
      grid.setAttribute("aria-label", words);
      grid.classList.toggle("past", past);
      list.replaceChildren(...facts.map(fact));
    },
  };
}
