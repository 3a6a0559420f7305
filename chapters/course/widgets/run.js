// A run of the engine: its states, what happened between two of them, where from.

import { letter, places } from "./view.js";

/** A state with its changes, by key or by place; null takes a key away. */
export function changed(state, changes) {
  if (!changes || typeof changes !== "object" || Array.isArray(changes)) return changes;
  const made = Array.isArray(state) ? [...state] : { ...state };
  for (const [key, value] of Object.entries(changes)) {
    if (value === null) delete made[key];
    else made[key] = changed(made[key], value);
  }
  return made;
}

/** What stands after a step: the changed snapshot, and what the engine told. */
export function after(state, told) {
  return { ...told, snapshot: changed(state.snapshot, told.snapshot) };
}

const names = (numbers) => numbers.map(letter).join(", ");

/** What happened in a step, in words. */
export function news(before, state) {
  const [old, now] = [places(before.snapshot), places(state.snapshot)];
  const all = [...now.keys()];
  const was = (number) => old.get(number);
  const moved = (number) => now.get(number).computed - (was(number)?.computed ?? 0);
  const gave = all.filter((n) => now.get(n).preemptions > (was(n)?.preemptions ?? 0));
  const ran = all.filter((n) => now.get(n).state === "running" && moved(n) > 0);
  const ended = state.events.filter((event) => event.finish_reason);
  const began = ran.filter((n) => was(n)?.state !== "running");
  const decoded = state.events.map((event) => event.request_id);
  const prompts = ran.filter((n) => !began.includes(n) && !decoded.includes(n));
  return [
    began.length && `${names(began)} ${began.length > 1 ? "start" : "starts"}.`,
    prompts.length && `Prompt computed: ${names(prompts)}.`,
    decoded.length && `New tokens: ${names(decoded)}.`,
    gave.length && `No page is left: ${names(gave)} must wait and computes again.`,
    ended.length && `Ended: ${names(ended.map((event) => event.request_id))}.`,
  ].filter(Boolean).join(" ");
}

/** A recorded run, a state at a time, as the engine's thread would give it. */
export function replay(runs) {
  let run, at;
  return {
    async start(requests, pages) {
      run = runs.find((one) => one.num_pages === pages);
      at = 0;
      return run;
    },
    next: async () => run.steps[at++],
  };
}

/** The engine in the notebook's kernel: it works one step for each question. */
export function kernel(model) {
  let answer;
  let last = Promise.resolve(); // one question at a time
  model.on("msg:custom", (message) => answer?.(message));
  const ask = (question) => {
    last = last.then(() => {
      model.send(question);
      return new Promise((resolve) => (answer = resolve));
    });
    return last;
  };
  return {
    start: (requests, pages) => ask({ start: { requests, pages } }),
    next: async () => (await ask({ step: true })).step,
  };
}
