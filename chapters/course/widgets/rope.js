import { frame, h, narrow, number, s, slider, tint } from "./parts.js";

const LONGEST = 17; // the largest distance is 2 ** 17, gpt-oss's 131,072 positions

/**
 * The score of a query and a key that stand `distance` apart: the dot product of the
 * two after each has been turned by its position. Pair i has the dimensions i and
 * i + D/2.
 */
export function score({ query, key }, { frequencies, concentration }, distance) {
  const half = frequencies.length;
  let sum = 0;
  for (let i = 0; i < half; i++) {
    const angle = distance * frequencies[i];
    const [a, b, c, d] = [query[i], query[i + half], key[i], key[i + half]];
    sum += (a * c + b * d) * Math.cos(angle) + (a * d - b * c) * Math.sin(angle);
  }
  return (sum * concentration ** 2) / Math.sqrt(2 * half);
}

/** Place on a slider to distance: each by itself up to 16, then 8 for each octave. */
export function distanceAt(place) {
  return place <= 16 ? place : Math.round(2 ** (4 + (place - 16) / 8));
}

const LAST = 16 + 8 * (LONGEST - 4);

const CURVES = { plain: tint(2), yarn: tint(5) };

export function render({ model, el }) {
  const [WIDTH, HEIGHT] = narrow() ? [360, 180] : [640, 200];
  const data = model.get("data");
  const kinds = { plain: data.plain, yarn: data.yarn };
  const place = slider(
    "positions apart",
    { max: LAST, value: 8, shown: (p) => number(distanceAt(p)) },
    () => draw(),
  );
  const start = slider("key's position", { max: 64, value: 0 }, () => draw());
  const yarn = h("input", { type: "checkbox", onchange: () => draw() });
  const check = h("label", { class: "check" }, yarn, h("span", {}, "YaRN"));
  const controls = [place.element, start.element, check];
  const dials = h("div", { class: "dials", "aria-hidden": "true" });
  const picture = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" });
  const legend = h(
    "p",
    { class: "legend" },
    h("span", { class: "key", style: `--key: ${tint(0)}` }, "query's hand"),
    h("span", { class: "key", style: `--key: ${tint(1)}` }, "key's hand"),
    h("span", { class: "key", style: `--key: ${CURVES.plain}` }, "score without YaRN"),
    h("span", { class: "key", style: `--key: ${CURVES.yarn}` }, "score with YaRN"),
  );
  const line = frame(el, "rope", model, controls, dials, picture, legend);

  const places = Array.from({ length: 4 * LAST + 1 }, (_, n) => n / 4);
  const curves = Object.fromEntries(
    Object.entries(kinds).map(([kind, turns]) => [
      kind,
      places.map((p) => score(data, turns, distanceAt(p))),
    ]),
  );
  const all = [...curves.plain, ...curves.yarn];
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const x = (p) => 6 + (p / LAST) * (WIDTH - 12);
  const y = (value) => HEIGHT - 26 - ((value - low) / (high - low)) * (HEIGHT - 36);

  function curve(kind, chosen) {
    const points = places.map((p, n) => `${x(p).toFixed(1)},${y(curves[kind][n]).toFixed(1)}`);
    const line = { points: points.join(" "), style: `stroke: ${CURVES[kind]}` };
    return s("polyline", { ...line, class: chosen ? "curve" : "curve other" });
  }

  function hand(angle, color, length) {
    const [dx, dy] = [length * Math.cos(angle), -length * Math.sin(angle)];
    return s("line", { x2: dx, y2: dy, style: `stroke: ${color}`, class: "hand" });
  }

  function dial(pair, frequency, position, distance) {
    const face = s(
      "svg",
      { viewBox: "-22 -22 44 44" },
      s("circle", { r: 20, class: "face" }),
      hand(position * frequency, tint(1), 13),
      hand((position + distance) * frequency, tint(0), 19),
    );
    const turns = (distance * frequency) / (2 * Math.PI);
    const text = turns < 0.01 ? "< 0.01" : number(turns, turns < 10 ? 2 : 0);
    return h("div", {}, face, h("b", {}, `pair ${pair}`), h("small", {}, `${text} turns`));
  }

  function draw() {
    const [kind, other] = yarn.checked ? ["yarn", "plain"] : ["plain", "yarn"];
    const { frequencies } = kinds[kind];
    const distance = distanceAt(place.value);
    dials.replaceChildren(
      ...data.pairs.map((pair) => dial(pair, frequencies[pair], start.value, distance)),
    );
    const value = score(data, kinds[kind], distance);
    const ticks = narrow() ? [1, 16, 256, 4096, 131072] : [1, 16, 128, 1024, 4096, 32768, 131072];
    const marks = ticks.flatMap((tick) => {
      const p = tick <= 16 ? tick : 16 + 8 * (Math.log2(tick) - 4);
      const at = { x: x(p), y: HEIGHT - 6, class: "tick" };
      const anchor = tick === 131072 ? "end" : "middle";
      const rule = { x1: x(p), x2: x(p), y1: 4, y2: HEIGHT - 22, class: "level" };
      return [s("line", rule), s("text", { ...at, "text-anchor": anchor }, number(tick))];
    });
    const zero = { x1: x(0), x2: x(LAST), y1: y(0), y2: y(0), class: "level" };
    picture.replaceChildren(
      ...marks,
      s("line", zero),
      s("text", { x: x(0) + 4, y: y(0) - 4, class: "tick" }, "0"),
      curve(other, false),
      curve(kind, true),
      s("circle", { cx: x(place.value), cy: y(value), r: 5, style: `fill: ${CURVES[kind]}` }),
    );
    const slowest = (2 * Math.PI) / frequencies.at(-1);
    const name = yarn.checked ? "with YaRN" : "without YaRN";
    line.textContent =
      `${number(distance)} positions apart, ${name}: score ${number(value, 2)}. ` +
      `The slowest pair turns once in ${number(slowest)} positions.`;
  }

  draw();
}

export default { render };
