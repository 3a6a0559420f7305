// What the course's widgets and the server's page are made of: elements, sliders,
// buttons, and the frame around them.

// Okabe and Ito's palette, as in chapters/course/__init__.py.
export const COLORS = [
  "#0072B2", // blue
  "#D55E00", // vermilion
  "#009E73", // green
  "#CC79A7", // purple
  "#56B4E9", // sky
  "#E69F00", // orange
  "#F0E442", // yellow
  "#999999",
];

/** One of these on the page's paper, light or dark. */
export function tint(place) {
  return `color-mix(in srgb, ${COLORS[place]} 80%, var(--ink))`;
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    // Not as an attribute, which the policy of the server's page would refuse.
    else if (name === "style") element.style.cssText = value || "";
    else if (value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** An HTML element; an attribute "onclick" is a listener. */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  return filled(element, attributes, children);
}

/** A button; its text can be changed. */
export function button(text, onclick) {
  return h("button", { type: "button", onclick }, text);
}

/**
 * A labeled slider over whole numbers. `shown` turns its number into what stands
 * beside it and is read aloud.
 */
export function slider(label, { min = 0, max, value = min, shown = String }, moved) {
  const input = h("input", { type: "range", min, max, step: 1, value });
  const output = h("output");
  const update = () => {
    output.textContent = shown(Number(input.value));
    input.setAttribute("aria-valuetext", output.textContent);
  };
  input.addEventListener("input", () => {
    update();
    moved(Number(input.value));
  });
  update();
  const element = h("label", { class: "slider" }, h("span", {}, label), input, output);
  return {
    element,
    input,
    get value() {
      return Number(input.value);
    },
    set(number, most = Number(input.max)) {
      input.max = most;
      input.value = number;
      update();
    },
  };
}

/** A labeled list to choose from; `moved` gets the place of what was chosen. */
export function choice(label, names, moved) {
  const options = names.map((name, place) => h("option", { value: place }, name));
  const select = h("select", { onchange: () => moved(Number(select.value)) }, ...options);
  return h("label", { class: "choice" }, h("span", {}, label), select);
}

/** A number with its thousands apart, and as many decimals as it has to have. */
export function number(value, decimals = 0) {
  return value.toLocaleString("en-US", {
    minimumFractionDigits: decimals,
    maximumFractionDigits: decimals,
  });
}

/** Whether the screen is a phone's; the style sheets draw the line at the same place. */
export function narrow() {
  return window.matchMedia("(max-width: 600px)").matches;
}

/** Bytes as people say them. */
export function bytes(count) {
  const units = ["B", "kB", "MB", "GB"];
  const power = Math.min(3, Math.floor(Math.log10(Math.max(1, count)) / 3));
  return `${number(count / 1000 ** power, power ? 1 : 0)} ${units[power]}`;
}

/**
 * Put a widget into `el`: its controls, one line that says what is seen (and is read
 * aloud when it changes), the other parts, and what it shows in words. Returns the line.
 */
export function frame(el, name, model, controls, ...parts) {
  const alt = model.get("alt");
  const line = h("p", { class: "line", "aria-live": "polite" });
  const words = h("details", {}, h("summary", {}, "As text"), h("p", {}, alt));
  const attributes = {
    class: `simplellm-widget ${name}`,
    role: "group",
    "aria-label": alt.split(/(?<=\.)\s/)[0],
    // An arrow turns the book's page, and a letter is a shortcut in JupyterLab: here
    // the keys belong to the widget.
    onkeydown: (event) => event.stopPropagation(),
    "data-lm-suppress-shortcuts": "true",
  };
  const controlled = h("div", { class: "controls" }, ...controls);
  el.replaceChildren(h("div", attributes, controlled, line, ...parts, words));
  return line;
}
