// The engine of this server as it works, drawn as the course draws it.

import { frame, number } from "./parts.js";
import { ask, events } from "./server.js";
import { letter, owners, picture } from "./view.js";

const WORDS =
  "The engine at work, as it is a few times a second. A row for each request: whether " +
  "it waits or runs, and how many of its tokens are computed. Below the rows, the pages " +
  "of the cache that they hold, each with its owners' letters: the beginning that " +
  "prompts have in common belongs to all of them. Pages that nobody holds are kept to " +
  "be found again, until others need them. When no page is left, a request gives way, " +
  "waits, and computes again what isn't kept.";
const ENDED = 4; // rows of requests that are over
const MOST = 240; // pages that are drawn
const PLACES = 4; // of drafts, that are told of one by one
const SPAN = 3000; // milliseconds over which a speed is measured
const SHORTEST = 256; // tokens of a full bar, if no request has more
const AGAIN = 2000; // milliseconds until the next try, where there is no connection

/** The speed at which a counter grows, in numbers a second, from what it was lately. */
class Speed {
  seen = []; // pairs of a time and a count

  take(now, count) {
    this.seen.push([now, count]);
    while (now - this.seen[0][0] > SPAN) this.seen.shift();
    const [then, before] = this.seen[0];
    return now > then ? (1000 * (count - before)) / (now - then) : 0;
  }
}

/** The requests that are or were there, by the engine's number; each has a letter. */
class Rows {
  known = new Map();

  /** What is there now; `turn` is the chat's latest, for a request that is ours. */
  take({ running, waiting, totals }, turn) {
    const cut = running.length < totals.running || waiting.length < totals.waiting;
    const there = new Map();
    for (const now of running) there.set(now.request_id, { now, kind: "running" });
    for (const now of waiting) there.set(now.request_id, { now, kind: "waiting" });
    for (const [id, row] of this.known) {
      if (there.has(id)) continue;
      if (cut) this.known.delete(id); // it may be among those that are not told of
      else row.kind = "ended";
    }
    const ended = [...this.known].filter(([, row]) => row.kind === "ended");
    for (const [id] of ended.slice(0, -ENDED)) this.known.delete(id);
    for (const [id, found] of there) {
      if (!this.known.has(id)) {
        this.known.set(id, { place: this.free(), turn: found.now.mine ? turn : null });
      }
      Object.assign(this.known.get(id), found);
    }
  }

  /** The first letter that nobody has. */
  free() {
    const taken = new Set([...this.known.values()].map(({ place }) => place));
    let place = 0;
    while (taken.has(place)) place += 1;
    return place;
  }

  /** What the picture is given of them, in the order in which they came. */
  get list() {
    const ids = [...this.known.keys()].sort((one, other) => one - other);
    return ids.map((id) => {
      const { place, kind, now, turn } = this.known.get(id);
      const finish = turn?.finish;
      const ended = finish === "stopped" ? finish : "finished";
      const reason = finish && finish !== ended ? ` (${finish})` : "";
      return {
        number: place,
        kind,
        now,
        fate: kind === "ended" ? ended + reason : kind,
        found: turn?.usage?.prompt_tokens_details.cached_tokens ?? 0,
        asked: turn ? turn.question : `${now.prompt} tokens in, ${now.output} out`,
        said: turn?.said ?? "",
      };
    });
  }

  /** Tables by number as tables by letter. */
  lettered(tables) {
    const entries = Object.entries(tables);
    return Object.fromEntries(
      entries.map(([id, groups]) => [this.known.get(Number(id)).place, groups]),
    );
  }
}

/** What became of drafts, by their place: nothing where none are checked. */
function drafting({ drafts, accepted }) {
  const places = Object.entries(drafts);
  if (!places.length) return [];
  const right = ([place, count]) => `${Math.round((100 * (accepted[place] ?? 0)) / count)} %`;
  const checked = places.reduce((sum, [, count]) => sum + count, 0);
  return [
    ["drafts checked", number(checked)],
    ["right, by place", places.slice(0, PLACES).map(right).join(", ")],
  ];
}

/** Who runs and who waits, in words; `past`: whether pages are seen that were held. */
function summary({ totals }, rows, past) {
  if (!totals.running && !totals.waiting) {
    return past ? "Idle. The pages are those that were held last." : "Idle.";
  }
  const names = (kind) => {
    const there = rows.filter((row) => row.kind === kind).map((row) => letter(row.number));
    return there.length ? `${totals[kind]} ${kind}: ${there.join(", ")}.` : "";
  };
  return `${names("running")} ${names("waiting")}`.trim();
}

/**
 * Show the engine in `el` for as long as the `panel` around it is open and the page is
 * seen. Returns `noticed`, to be called with the chat's turns as they begin and end.
 */
export function watch(el, panel) {
  const view = picture({ heldOnly: true });
  const speed = new Speed();
  const line = frame(el, "engine", { get: () => WORDS }, [], view.element);
  line.setAttribute("aria-live", "off"); // nobody can listen so fast
  const rows = new Rows();
  let latest = null;
  let perSecond = 0; // now or, if nothing runs, when something did last
  let lately = []; // the pages that were held last
  let turn = null;
  let connection = null; // what ends it

  function draw() {
    const { pages, totals } = latest;
    const requests = rows.list;
    const tokens = requests.map(({ now }) => now.prompt + now.output);
    const held = `${number(totals.held)} of ${number(pages.num_pages)}`;
    const seen = owners({ ...pages, tables: rows.lettered(pages.tables) })
      .filter((page) => page.owners.length)
      .slice(0, MOST);
    if (seen.length) lately = seen;
    const past = !seen.length && lately.length > 0;
    line.textContent = summary(latest, requests, past);
    view.draw({
      requests,
      longest: Math.max(SHORTEST, ...tokens),
      pages: lately,
      past,
      pageSize: pages.page_size,
      words:
        `${held} pages held, ${number(totals.shared)} of them by several requests; ` +
        `${number(totals.kept)} kept to be found again.`,
      facts: [
        ["running", number(totals.running)],
        ["waiting", number(totals.waiting)],
        [
          totals.running ? "tokens a second" : "tokens a second, last",
          number(Math.round(perSecond)),
          `Over ${SPAN / 1000} seconds`,
        ],
        ["tokens written", number(totals.tokens)],
        ["pages held", held, "Pages of the cache that requests hold now"],
        ["pages shared", number(totals.shared), "Held by several requests at once"],
        [
          "pages kept",
          number(totals.kept),
          "Held by nobody, and kept for prompts that begin the same way",
        ],
        [
          "prompt tokens found in the cache",
          number(totals.found),
          "Tokens of prompts that didn't have to be computed again",
        ],
        [
          "preemptions",
          number(totals.preemptions),
          "How often a request gave its pages to others and had to wait",
        ],
        ...drafting(totals),
      ],
    });
  }

  async function follow(signal) {
    while (!signal.aborted) {
      try {
        for await (const told of events(await ask("live", { signal }))) {
          latest = told;
          const speedNow = speed.take(performance.now(), told.totals.tokens);
          if (told.totals.running) perSecond = speedNow;
          rows.take(told, turn);
          draw();
        }
      } catch (error) {
        if (signal.aborted) return;
        line.textContent = `${error.message} Trying again.`;
      }
      await new Promise((done) => setTimeout(done, AGAIN));
    }
  }

  function look() {
    const wanted = panel.open && !document.hidden;
    if (wanted === Boolean(connection)) return;
    connection?.abort();
    connection = wanted ? new AbortController() : null;
    if (connection) follow(connection.signal);
  }

  panel.addEventListener("toggle", look);
  document.addEventListener("visibilitychange", look);
  look();
  return (one) => {
    turn = one;
    if (latest) draw();
  };
}
