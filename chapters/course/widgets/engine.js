import { button, frame, h, slider } from "./parts.js";
import { after, kernel, news, replay } from "./run.js";
import { owners, picture, places } from "./view.js";

const PAUSE = 250; // milliseconds between two steps
const SHOWN = 30; // steps of a record that are over when its page opens

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
  const view = picture();
  const line = frame(el, "engine", model, controls, view.element);

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

  /** A request as it was last seen: those that have ended are in no snapshot. */
  function known(number) {
    const past = states.slice(0, step.value + 1).map((state) => places(state.snapshot));
    return past.findLast((found) => found.has(number))?.get(number);
  }

  /** A row of the picture, of what the engine has told of a request. */
  function row(asked, seen) {
    const { request_id: number } = asked;
    const now = known(number);
    const ended = seen.find((event) => event.finish_reason);
    const kind = ended ? "ended" : (now?.state ?? "later");
    return {
      number,
      kind,
      now,
      fate: ended ? `ended: ${ended.finish_reason}` : { later: "not here yet" }[kind] ?? kind,
      found: seen.length ? seen[0].cached_tokens : 0,
      asked: asked.text,
      said: seen.map((event) => event.text).join(""),
    };
  }

  function draw() {
    const state = states[step.value];
    const { snapshot } = state;
    const past = states.slice(1, step.value + 1).flatMap((one) => one.events);
    const of = (asked) => past.filter((event) => event.request_id === asked.request_id);
    const requests = run.requests.map((asked) => row(asked, of(asked)));
    const pages = owners(snapshot.pages);
    const used = pages.filter((page) => page.owners.length).length;
    const shared = pages.filter((page) => page.owners.length > 1).length;
    const kept = pages.filter((page) => page.kept).length;
    view.draw({
      requests,
      longest: Math.max(...run.requests.map((r) => r.prompt_tokens + r.max_tokens)),
      pages,
      pageSize: run.page_size,
      words:
        `${used} of ${pages.length} pages held, ${shared} of them by several requests; ` +
        `${kept} kept to be found again.`,
      facts: [
        ["running", snapshot.running.length],
        ["waiting", snapshot.waiting.length],
        ["pages held", `${used} of ${pages.length}`],
        ["shared", shared],
        ["prompt tokens found", requests.reduce((sum, { found }) => sum + found, 0)],
        ["preemptions", state.preemptions],
      ],
    });
    const told = step.value ? news(states[step.value - 1], state) : "Nothing has run yet.";
    line.textContent = `Step ${step.value}. ${told}`;
  }

  open();
  return stop;
}

export default { render };
