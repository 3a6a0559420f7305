import { button, frame, h, narrow, number, s, slider, tint } from "./parts.js";

/** What MXFP4's specification takes: floor(log2 of the largest magnitude) - 2. */
export function specified(weights) {
  return Math.floor(Math.log2(Math.max(...weights.map(Math.abs)))) - 2;
}

/**
 * A block with the scale 2 ** exponent: the code of each weight, 0 to 7 and 8 more for
 * a minus sign, the value that it decodes to, and the sum of the squared errors.
 *
 * The nearest magnitude counts, on a tie the one with the even code.
 */
export function quantize(weights, exponent, magnitudes) {
  const scale = 2 ** exponent;
  const codes = weights.map((weight) => {
    const size = Math.abs(weight) / scale;
    let best = 0;
    for (let code = 1; code < magnitudes.length; code++) {
      const nearer = Math.abs(magnitudes[code] - size) - Math.abs(magnitudes[best] - size);
      if (nearer < 0 || (nearer === 0 && code % 2 === 0)) best = code;
    }
    return weight < 0 || Object.is(weight, -0) ? best + 8 : best;
  });
  const values = codes.map((code) => (code < 8 ? 1 : -1) * magnitudes[code % 8] * scale);
  const error = weights.reduce((sum, w, at) => sum + (w - values[at]) ** 2, 0);
  return { codes, values, error };
}

/** A power of two as it is written. */
function power(exponent) {
  const digits = [...String(exponent)].map((c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]));
  return `2${digits.join("")}`;
}

export function render({ model, el }) {
  const [WIDTH, HEIGHT] = narrow() ? [360, 200] : [640, 240];
  const { weights, magnitudes } = model.get("data");
  const norm = Math.sqrt(weights.reduce((sum, w) => sum + w * w, 0));
  const start = specified(weights);
  const exponent = slider(
    "scale",
    { min: start - 4, max: start + 4, value: start + 3, shown: power },
    () => draw(),
  );
  const rule = button("As specified", () => {
    exponent.set(start);
    draw();
  });
  const picture = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" });
  const codes = h("ol", { class: "codes", start: 0, "aria-label": "codes" });
  const controls = [exponent.element, rule];
  const legend = h(
    "p",
    { class: "legend" },
    h("span", { class: "key dot", style: `--key: ${tint(0)}` }, "the weight"),
    h("span", { class: "key", style: `--key: ${tint(1)}` }, "what it decodes to"),
    h("span", { class: "key thin", style: "--key: var(--rule)" }, "the values that exist"),
  );
  const line = frame(el, "scale", model, controls, picture, legend, codes);

  const most = 1.15 * Math.max(...weights.map(Math.abs));
  const x = (at) => ((at + 0.5) * WIDTH) / weights.length;
  const y = (value) => HEIGHT / 2 - (value / most) * (HEIGHT / 2);

  function draw() {
    const e = exponent.value;
    const block = quantize(weights, e, magnitudes);
    picture.replaceChildren();
    for (const magnitude of magnitudes) {
      for (const level of [magnitude * 2 ** e, -magnitude * 2 ** e]) {
        if (Math.abs(level) > most) continue;
        const at = { x1: 0, x2: WIDTH, y1: y(level), y2: y(level), class: "level" };
        picture.append(s("line", at));
      }
    }
    weights.forEach((weight, at) => {
      const off = { x1: x(at), x2: x(at), y1: y(weight), y2: y(block.values[at]) };
      const value = { x: x(at) - 7, y: y(block.values[at]) - 1.5, width: 14, height: 3 };
      picture.append(
        s("line", { ...off, class: "error" }),
        s("rect", { ...value, style: `fill: ${tint(1)}` }),
        s("circle", { cx: x(at), cy: y(weight), r: 3.5, style: `fill: ${tint(0)}` }),
      );
    });
    codes.replaceChildren(
      ...block.codes.map((code) => h("li", {}, code.toString(2).padStart(4, "0"))),
    );
    const clipped = weights.filter((w) => Math.abs(w) > 6 * 2 ** e).length;
    const zeros = block.codes.filter((code) => code % 8 === 0).length;
    const relative = (100 * Math.sqrt(block.error)) / norm;
    const chosen = e === start ? "This is the specification's choice. " : "";
    line.textContent =
      `Relative error ${number(relative, 1)} %. ${chosen}` +
      `${zeros} of ${weights.length} weights become 0, ${clipped} lie beyond 6 × ${power(e)}.`;
  }

  draw();
}

export default { render };
