import { button, choice, frame, h, slider } from "./parts.js";

/**
 * Every merge of one piece of a text, as byte-pair encoding does them.
 *
 * `bytes` is a string with a character for each byte, `ids` the id of each token by
 * its bytes. Returns one state for each merge and one before: its parts, the id that
 * each pair of neighbors would become (undefined: no token), and which pair is next.
 */
export function mergesOf(bytes, ids) {
  let parts = [...bytes];
  const states = [];
  for (;;) {
    const pairs = parts.slice(1).map((part, at) => ids.get(parts[at] + part));
    const possible = pairs.filter((id) => id !== undefined);
    const next = possible.length ? pairs.indexOf(Math.min(...possible)) : -1;
    states.push({ parts, pairs, next });
    if (next < 0) return states;
    const merged = parts[next] + parts[next + 1];
    parts = [...parts.slice(0, next), merged, ...parts.slice(next + 2)];
  }
}

/** The bytes of a text in UTF-8, a character for each. */
export function latin(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

/** The pieces that a text is cut into, each with all its states. */
export function walk(text, table) {
  const ids = new Map(table.tokens.map((token, id) => [token, id]));
  const pieces = text.match(new RegExp(table.pattern, "gu")) ?? [];
  return pieces.map((piece) => mergesOf(latin(piece), ids));
}

/** The ids of a text. */
export function encode(text, table) {
  const ends = walk(text, table).flatMap((states) => states.at(-1).parts);
  return ends.map((part) => table.tokens.indexOf(part));
}

/** A token as people read it: a space as a dot, other bytes as two digits each. */
function readable(token) {
  const one = (c) => (c === " " ? "·" : c > " " && c <= "~" ? c : hex(c));
  return [...token].map(one).join("");
}

function hex(character) {
  return character.charCodeAt(0).toString(16).padStart(2, "0") + " ";
}

export function render({ model, el }) {
  const tables = model.get("data");
  let table = tables[0];
  let pieces = []; // of the text, each with its states
  const input = h("input", {
    type: "text",
    maxlength: 60,
    spellcheck: "false",
    oninput: () => retype(),
  });
  const step = slider("merge", { max: 0, shown: (k) => `${k} of ${total()}` }, () => draw());
  const tiles = h("div", { class: "tiles" });
  const buttons = h(
    "span",
    { class: "buttons" },
    button("Merge", () => go(step.value + 1)),
    button("All", () => go(total())),
  );
  const typed = h("label", {}, h("span", {}, "text"), input);
  const which = choice("merges of", tables.map(({ name }) => name), (place) => take(place));
  const controls = [which, typed, step.element, buttons];
  const line = frame(el, "merge", model, controls, tiles);

  function total() {
    return pieces.reduce((sum, states) => sum + states.length - 1, 0);
  }

  function take(place) {
    table = tables[place];
    input.value = table.text;
    retype();
  }

  function retype() {
    pieces = walk(input.value, table);
    step.set(0, total());
    draw();
  }

  function go(k) {
    step.set(Math.min(k, total()));
    draw();
  }

  /** A piece after `left` of its merges; the pair that goes next only if `active`. */
  function piece(states, left, active) {
    const { parts, pairs, next } = states[Math.min(left, states.length - 1)];
    const row = h("span", { class: "piece" });
    parts.forEach((part, at) => {
      const chosen = active && next >= 0 && (at === next || at === next + 1);
      const id = h("small", {}, String(table.tokens.indexOf(part)));
      row.append(h("span", { class: chosen ? "tile chosen" : "tile" }, readable(part), id));
      if (at < pairs.length && active) {
        const mark = pairs[at] === undefined ? "–" : String(pairs[at]);
        row.append(h("span", { class: at === next ? "pair chosen" : "pair" }, mark));
      }
    });
    return row;
  }

  function draw() {
    let left = step.value;
    let told = "";
    let open = false; // whether the piece that is worked on has been met
    tiles.replaceChildren();
    for (const states of pieces) {
      const active = !open && left < states.length - 1;
      if (active) {
        const { parts, pairs, next } = states[left];
        const pair = `${readable(parts[next])} and ${readable(parts[next + 1])}`;
        told = `Next: ${pair}, the pair with the lowest id here, become token ${pairs[next]}.`;
        open = true;
      }
      tiles.append(piece(states, left, active));
      left = Math.max(0, left - states.length + 1);
    }
    const count = tiles.querySelectorAll(".tile").length;
    const end = "No pair of neighbors in a piece is a token: done.";
    line.textContent = `${count} tokens. ${told || end}`;
  }

  take(0);
}

export default { render };
