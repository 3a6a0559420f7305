import { bytes, choice, frame, h, number, slider } from "./parts.js";

/** How many of the first `batch` tokens go to each expert. */
export function loads(router, batch) {
  const counts = new Array(router.experts).fill(0);
  for (const chosen of router.routes.slice(0, batch)) {
    for (const expert of chosen) counts[expert] += 1;
  }
  return counts;
}

/** The experts that a batch touches if tokens choose independently. */
export function expected({ experts, routes }, batch) {
  return experts * (1 - (1 - routes[0].length / experts) ** batch);
}

export function render({ model, el }) {
  const { routers } = model.get("data");
  let router = routers[0];
  const batch = slider("tokens in the batch", { min: 1, max: 1 }, () => draw());
  const which = choice("router", routers.map(({ name }) => name), (place) => {
    router = routers[place];
    reset(batch.value);
  });
  const grid = h("div", { class: "experts", "aria-hidden": "true" });
  const facts = h("dl", { class: "facts" });
  const controls = [which, batch.element];
  const line = frame(el, "experts", model, controls, grid, facts);

  function reset(tokens) {
    batch.set(Math.min(tokens, router.routes.length), router.routes.length);
    grid.classList.toggle("few", router.experts <= 32);
    const cells = Array.from({ length: router.experts }, () => h("span", {}));
    grid.replaceChildren(...cells);
    draw();
  }

  function fact(name, value) {
    return h("div", {}, h("dt", {}, name), h("dd", {}, value));
  }

  function draw() {
    const counts = loads(router, batch.value);
    const touched = counts.filter((count) => count > 0).length;
    const read = touched * router.bytes;
    const most = Math.max(...counts);
    counts.forEach((count, expert) => {
      const cell = grid.children[expert];
      cell.classList.toggle("touched", count > 0);
      cell.style.setProperty("--load", `${45 + (55 * count) / most}%`);
      cell.textContent = count || "";
    });
    facts.replaceChildren(
      fact("experts touched", `${touched} of ${router.experts}`),
      fact("if tokens chose by chance", number(expected(router, batch.value), 1)),
      fact("bytes read in a layer", bytes(read)),
      fact("bytes a token", bytes(read / batch.value)),
    );
    const tokens = batch.value === 1 ? "1 token reads" : `${batch.value} tokens read`;
    line.textContent =
      `${tokens} ${touched} of ${router.experts} experts, ${bytes(read)} in a layer: ` +
      `${bytes(read / batch.value)} a token. The busiest one works for ${most}.`;
  }

  reset(8);
}

export default { render };
