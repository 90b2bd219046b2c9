// A chat to try a model.

import {chat} from "./api.js";
import {byId, element, seconds} from "./dom.js";

let messages = [];
let running = null;

export function setUpChat(onRequest) {
  byId("chat-form").addEventListener("submit", (event) => { event.preventDefault(); if (running) running.abort(); else send(onRequest); });
  byId("chat-text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); byId("chat-form").requestSubmit(); }
  });
  byId("chat-clear").addEventListener("click", () => { running?.abort(); running = null; messages = []; byId("chat-send").textContent = "Send"; byId("chat-log").replaceChildren(); byId("chat-text").focus(); });
}

export function showChatModels(names) {
  const select = byId("chat-model");
  if ([...select.options].map((option) => option.value).join() === names.join()) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => element("option", {value: name}, name)));
  if (names.includes(chosen)) select.value = chosen;
}

function paragraph(who, text) {
  const said = element("span", {}, text), made = element("p", {}, element("span", {class: "who"}, who), said);
  byId("chat-log").append(made);
  return said;
}

async function send(onRequest) {
  const field = byId("chat-text"), text = field.value.trim(), log = byId("chat-log"), model = byId("chat-model").value;
  if (!text || !model) return;
  // What is begun anew is another conversation, and goes on without this answer.
  const conversation = messages, mine = running = new AbortController();
  conversation.push({role: "user", content: text});
  paragraph("you", text);
  field.value = "";
  const answer = paragraph(model, "");
  byId("chat-send").textContent = "Stop";
  const beganMs = performance.now();
  let firstMs = null;
  try {
    const {id, usage} = await chat(model, conversation, Number(byId("chat-tokens").value) || 128, (piece) => {
      firstMs ??= performance.now() - beganMs;
      answer.append(piece);
      log.scrollTop = log.scrollHeight;
    }, mine.signal);
    const about = `first token after ${seconds((firstMs ?? 0) / 1000)}, ${usage?.completion_tokens ?? "?"} tokens in ${seconds((performance.now() - beganMs) / 1000)} `;
    answer.parentElement.append(element("span", {class: "who"}, about, element("button", {class: "link", type: "button", onclick: () => onRequest(id)}, "timeline")));
  } catch (error) {
    if (error.name !== "AbortError") answer.parentElement.append(element("span", {class: "bad"}, error.message));
  } finally {
    if (answer.textContent) conversation.push({role: "assistant", content: answer.textContent});
    else conversation.pop();
    if (running === mine) { running = null; byId("chat-send").textContent = "Send"; }
    log.scrollTop = log.scrollHeight;
  }
}
