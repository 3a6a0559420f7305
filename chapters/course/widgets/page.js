// On a page of the book: what anywidget does in a notebook, with data of the page.

export function show(name, render) {
  const state = JSON.parse(document.getElementById(`widget-${name}-data`).textContent);
  const model = { get: (key) => state[key], on() {}, off() {}, send() {} };
  render({ model, el: document.getElementById(`widget-${name}`) });
}
