import { button, COLORS, frame, h, slider } from "./parts.js";
import { after, kernel, letter, news, owners, places, replay } from "./run.js";

const PAUSE = 250; // milliseconds between two steps
const SHOWN = 30; // steps of a record that are over when its page opens

// Lighter than in the figures, so that letters on it can be read.
const color = (number) => `color-mix(in srgb, ${COLORS[number % COLORS.length]} 78%, white)`;

export function render({ model, el }) {
  const live = model.get("live");
  const { choices } = live ? model.get("data") : model.get("data").record;
  const source = live ? kernel(model) : replay(model.get("data").record.runs);
  let run = null; // the prompts and limits of what is shown
  let states = []; // one after each step, and one before the first
  let busy = false; // a question is under way
  let timer = 0;

  const play = button("Start", () => (timer ? stop() : begin()));
  const next = button("Step", () => (stop(), forward()));
  const again = button("Restart", () => (stop(), restart()));
  const step = slider("step", { max: 0, shown: (n) => `${n}` }, () => (stop(), draw()));
  const several = (list) => ({
    max: list.length - 1,
    value: Math.floor((list.length - 1) / 2),
    shown: (place) => `${list[place]}`,
  });
  const requests = slider("requests", several(choices.requests), () => (stop(), restart()));
  const pages = slider("pages", several(choices.pages), () => (stop(), restart()));
  requests.element.hidden = choices.requests.length < 2;
  const buttons = h("span", { class: "buttons" }, play, next, again);
  const controls = [buttons, step.element, requests.element, pages.element];
  const rows = h("ol", { class: "requests" });
  const grid = h("div", { class: "pool", role: "img" });
  const facts = h("dl", { class: "facts" });
  const legend = h(
    "p",
    { class: "legend" },
    h("span", { class: "leaf", style: `--fill: ${color(4)}` }, "full layers"),
    h("span", { class: "leaf sliding", style: `--fill: ${color(4)}` }, "sliding layers"),
    h("span", { class: "leaf", style: `--fill: ${stripes([4, 5])}` }, "shared"),
    h("span", { class: "leaf kept" }, "kept to be found"),
    h("span", { class: "leaf" }, "empty"),
  );
  const side = h("div", { class: "side" }, grid, legend, facts);
  const halves = h("div", { class: "halves" }, rows, side);
  const line = frame(el, "engine", model, controls, halves);

  function begin() {
    play.textContent = "Pause";
    line.setAttribute("aria-live", "off"); // nobody can listen so fast
    timer = setInterval(forward, PAUSE);
    forward();
  }

  function stop() {
    clearInterval(timer);
    timer = 0;
    play.textContent = "Start";
    line.setAttribute("aria-live", "polite");
  }

  async function open() {
    await restart();
    while (!live && step.value < SHOWN) await forward();
  }

  async function restart() {
    busy = true;
    run = await source.start(choices.requests[requests.value], choices.pages[pages.value]);
    states = [after({}, run.first)];
    busy = false;
    step.set(0, 0);
    draw();
  }

  async function forward() {
    if (busy || !el.isConnected) return;
    if (step.value === states.length - 1) {
      busy = true;
      const told = await source.next();
      busy = false;
      if (!told) return stop();
      states.push(after(states.at(-1), told));
    }
    step.set(step.value + 1, states.length - 1);
    draw();
  }

  /** Which part of a request's row is what: shares of the longest request's tokens. */
  function bar({ prompt, output, computed }, found, number) {
    const longest = Math.max(...run.requests.map((r) => r.prompt_tokens + r.max_tokens));
    const cached = Math.min(found, computed);
    const part = (kind, tokens) => h("i", { class: kind, style: `width: ${(100 * tokens) / longest}%` });
    const done = Math.min(computed, prompt + output);
    return h(
      "span",
      { class: "bar", style: `--fill: ${color(number)}`, "aria-hidden": "true" },
      part("cached", cached),
      part("done", done - cached),
      part("todo", prompt + output - done),
    );
  }

  /** A request as it was last seen: those that have ended are in no snapshot. */
  function known(number) {
    const past = states.slice(0, step.value + 1).map((state) => places(state.snapshot));
    return past.findLast((found) => found.has(number))?.get(number);
  }

  function row(asked, seen) {
    const { number } = asked;
    const now = known(number);
    const text = seen.map((event) => event.text).join("");
    const ended = seen.find((event) => event.finish_reason);
    const found = seen.length ? seen[0].cached_tokens : 0;
    const kind = ended ? "ended" : (now?.state ?? "later");
    const facts = [
      ended ? `ended: ${ended.finish_reason}` : { later: "not here yet" }[kind] ?? kind,
      found && `${found} tokens found`,
      now?.preemptions && `gave way ${now.preemptions} times`.replace("1 times", "once"),
    ].filter(Boolean);
    const shown = now ? bar(now, found, number) : h("span", { class: "bar" });
    return h(
      "li",
      { class: kind },
      h("b", { class: "chip", style: `--fill: ${color(number)}` }, letter(number)),
      h("span", { class: "fate" }, facts.join(" · ")),
      shown,
      h("span", { class: "asked" }, asked.text),
      h("span", { class: "said" }, ...spoken(text)),
    );
  }

  /** Text whose control tokens stand back. */
  function spoken(text) {
    const parts = text.split(/(<\|[^|]*\|>)/).filter(Boolean);
    return parts.map((part) => (part.startsWith("<|") ? h("small", {}, part) : part));
  }

  function stripes(numbers) {
    const share = 100 / numbers.length;
    const stops = numbers.map((n, at) => `${color(n)} ${at * share}% ${(at + 1) * share}%`);
    return `linear-gradient(135deg, ${stops.join(", ")})`;
  }

  function cell(page, number) {
    const letters = page.owners.map(letter);
    const short = letters.length > 3 ? `${letters[0]}+${letters.length - 1}` : letters.join("");
    const classes = ["leaf", page.group === 1 && "sliding", page.kept && "kept"];
    const held = page.owners.length;
    const style = held ? `--fill: ${stripes(page.owners)}` : "";
    const where = `tokens from ${page.index * run.page_size} on, held by ${letters.join(", ")}`;
    const title = `page ${number}: ${held ? where : page.kept ? "kept" : "empty"}`;
    return h("span", { class: classes.filter(Boolean).join(" "), style, title }, short);
  }

  function draw() {
    const state = states[step.value];
    const { snapshot } = state;
    const past = states.slice(1, step.value + 1).flatMap((one) => one.events);
    const of = (asked) => past.filter((event) => event.number === asked.number);
    rows.replaceChildren(...run.requests.map((asked) => row(asked, of(asked))));
    for (const said of rows.querySelectorAll(".said")) said.scrollTop = said.scrollHeight;
    const held = owners(snapshot.pages);
    grid.replaceChildren(...held.map(cell));
    const used = held.filter((page) => page.owners.length).length;
    const shared = held.filter((page) => page.owners.length > 1).length;
    const kept = held.filter((page) => page.kept).length;
    const words = `${used} of ${held.length} pages held, ${shared} of them by several requests`;
    grid.setAttribute("aria-label", `${words}; ${kept} kept to be found again.`);
    const firsts = run.requests.map((asked) => of(asked)[0]?.cached_tokens ?? 0);
    const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, `${value}`));
    facts.replaceChildren(
      fact("running", snapshot.running.length),
      fact("waiting", snapshot.waiting.length),
      fact("pages held", `${used} of ${held.length}`),
      fact("shared", shared),
      fact("prompt tokens found", firsts.reduce((sum, n) => sum + n, 0)),
      fact("preemptions", state.preemptions),
    );
    const told = step.value ? news(states[step.value - 1], state) : "Nothing has run yet.";
    line.textContent = `Step ${step.value}. ${told}`;
  }

  open();
  return stop;
}

export default { render };
