// A chapter folds a kept version with <details> in the Markdown cell before its code and
// </details> in the one behind it. GitHub and the book fold what lies between; JupyterLab
// renders each cell by itself, so that there the toggle would hold nothing. With this
// extension it opens and closes the code of the cells between. And figures follow the
// theme. `make lab` loads it.

// Whether a cell's Markdown leaves a fold open.
const isOpen = (text) => text.lastIndexOf("<details") > text.lastIndexOf("</details>");

// A figure has colors for dark pages. An image doesn't see JupyterLab's theme, but it
// sees this.
const THEMES = `
  [data-jp-theme-light="true"] .jp-Notebook img { color-scheme: light; }
  [data-jp-theme-light="false"] .jp-Notebook img { color-scheme: dark; }
`;

function activate(app) {
  const style = document.createElement("style");
  style.textContent = THEMES;
  document.head.append(style);
  const toggled = ({ target }) => {
    const panels = [...app.shell.widgets("main")];
    const panel = panels.find((panel) => panel.node.contains(target));
    const cells = panel?.content?.widgets ?? [];
    const first = cells.findIndex(
      (cell) => cell.model?.type === "markdown" && cell.node.contains(target)
    );
    if (first < 0 || !isOpen(cells[first].model.sharedModel.getSource())) {
      return;
    }
    // Of a cell's folds only the last one can be open at its end.
    if ([...cells[first].node.querySelectorAll("details")].at(-1) !== target) {
      return;
    }
    for (const cell of cells.slice(first + 1)) {
      if (cell.model.sharedModel.getSource().includes("</details>")) {
        break;
      }
      if (cell.model.type === "code") {
        cell.inputHidden = !target.open;
      }
    }
    // The notebook may have scrolled when the cells below changed their heights.
    setTimeout(() => target.scrollIntoView({ block: "nearest" }), 200);
  };
  document.addEventListener("toggle", toggled, true); // the event does not bubble
}

// What JupyterLab expects of an extension that was built apart from it.
const plugin = { id: "simplellm-folds:plugin", autoStart: true, activate };
window._JUPYTERLAB = window._JUPYTERLAB ?? {};
window._JUPYTERLAB["simplellm-folds"] = {
  init: () => {},
  get: async () => () => ({ __esModule: true, default: plugin }),
};
