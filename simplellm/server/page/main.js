// The page: it asks for a key if the server does, then opens the chat and the view.

import { chat } from "./chat.js";
import { watch } from "./live.js";
import { narrow } from "./parts.js";
import { ask, useKey } from "./server.js";

const [main] = document.getElementsByTagName("main");
const [door, key, trouble, model, panel, question] = [
  "door",
  "key",
  "trouble",
  "model",
  "engine",
  "question",
].map((id) => document.getElementById(id));
const AGAIN = 2000; // milliseconds
let begun = false; // whether the chat is there

function complain(words) {
  trouble.textContent = words;
  trouble.hidden = !words;
}

/** Show the form for the key; the one that was sent, if any, is wrong. */
function close() {
  complain(begun || !door.hidden ? "This key is wrong." : "");
  main.hidden = true;
  door.hidden = false;
  key.focus();
}

/** Show the chat if the server lets us. */
async function open() {
  let models;
  try {
    models = await (await ask("v1/models")).json();
  } catch (error) {
    if (error.status === 401) return close();
    complain(`${error.message} Trying again.`);
    setTimeout(open, AGAIN);
    return;
  }
  complain("");
  door.hidden = true;
  main.hidden = false;
  model.textContent = `model: ${models.data[0].id}`;
  if (!begun) {
    begun = true;
    panel.open = !narrow();
    const noticed = watch(document.getElementById("view"), panel);
    chat(models.data[0].id, noticed, close);
  }
  question.focus();
}

door.addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(key.value);
  key.value = "";
  open();
});
open();
