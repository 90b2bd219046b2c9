// The console: asks the gateway once a second what there is, and draws it. Nothing is asked for while nobody looks.

import {admin, keys} from "./api.js";
import {setUpChat, showChatModels} from "./chat.js";
import {byId, element, keyed, put} from "./dom.js";
import {drawAll, showInstances} from "./instances.js";
import {drawHistory, remember} from "./history.js";
import {showRequests, showSlo, showTimeline} from "./requests.js";
import {showAdapters, showBatches, showModels, showPlan, showQueues} from "./side.js";

const STATE_MS = 1000, SLOW_MS = 4000;
let shownRequest = "";
let served = [];
/** Names of the models that can be. */
let isAsking = false;

function say(text, isBad = false) {
  const news = byId("news");
  put(news, text);
  news.className = isBad ? "bad" : "";
}

/** Runs an action of the operator, and says what came of it. */
async function act(what, work) {
  say(`${what} …`);
  try { await work(); say(`${what}: done`); }
  catch (error) { say(`${what}: ${error.message}`, true); if (error.status === 401) askForKeys(); }
  soon();
}

// ---------------------------------------------------------------------------------------------------- looking

function totals(state) {
  const sum = (of) => state.instances.reduce((total, one) => total + (one.load ? of(one.load) : 0), 0);
  const queued = state.queues?.reduce((total, queue) => total + queue.online + queue.offline, 0);
  const items = [
    ["instances", state.instances.length], ["running", sum((load) => load.num_running)], ["waiting", sum((load) => load.num_waiting)],
    ["queued", queued ?? "?"], ["moving", sum((load) => load.num_migrating_out)],
  ];
  keyed(byId("totals"), items, ([name]) => name, ([name]) => element("div", {}, element("dt", {}, name), element("dd", {})), (box, [, value]) => put(box.querySelector("dd"), value));
}

async function look() {
  const state = await admin("GET", "/console/state");
  put(byId("gateway"), state.gateway_id);
  totals(state);
  showInstances(state, {onDrain: drain, onRequest: openRequest});
  showQueues(state.queues);
  showBatches(state.batches, state.now_s);
  remember(state);
  if (document.activeElement !== byId("num-instances")) byId("num-instances").placeholder = state.instances.length;
  if (!byId("panel-requests").hidden) await lookAtRequests();
}

async function lookAtRequests() {
  const missed = byId("only-missed").checked;
  showRequests((await admin("GET", `/requests?limit=60&missed=${missed}`)).requests, openRequest);
  if (shownRequest) await lookAtTimeline();
}

async function lookAtTimeline() {
  const asked = shownRequest;
  try {
    const {requests} = await admin("GET", `/requests/${encodeURIComponent(asked)}`);
    if (shownRequest !== asked) return;  // closed, or another is looked at by now
    showTimeline(requests);
    if (requests.every((one) => one.is_over && Date.now() / 1000 - one.arrived_s - one.duration_s > 3)) shownRequest = "";
  } catch (error) {
    if (shownRequest === asked) shownRequest = "";
    say(error.message, true);
  }
}

async function lookSlowly() {
  const [{models, adapters}, plan] = await Promise.all([admin("GET", "/models?interval_s=60"), admin("GET", "/plan").catch(() => null)]);
  showModels(models, {onScale: scaleModel, onRemove: removeModel});
  showAdapters(adapters, {onRemove: removeModel});
  showPlan(plan, {onPlan: changePlan});
  served = models.filter((model) => !model.failure).map((model) => model.name);
  showChatModels([...served, ...adapters.filter((adapter) => served.includes(adapter.base)).map((adapter) => adapter.name)]);
  if (!byId("panel-slo").hidden) showSlo(await admin("GET", "/slo?interval_s=300"), openRequest);
}

let slowAt = 0;

async function turn() {
  if (isAsking || document.hidden || byId("keys-dialog").open) return;
  isAsking = true;
  try {
    await look();
    if (performance.now() - slowAt > SLOW_MS) { await lookSlowly(); slowAt = performance.now(); }
    if (byId("news").dataset.problem) { delete byId("news").dataset.problem; say(""); }
  } catch (error) {
    say(error.message, true);
    byId("news").dataset.problem = "yes";
    if (error.status === 401) askForKeys();
  } finally { isAsking = false; }
}

function soon() { slowAt = -SLOW_MS * 2; turn(); }

// ---------------------------------------------------------------------------------------------------- acting

function askFor(id) {
  const dialog = byId(id);
  dialog.returnValue = "cancel";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "ok"), {once: true}));
}

async function isSure(title, text, button) {
  put(byId("sure-title"), title); put(byId("sure-text"), text); put(byId("sure-ok"), button);
  return askFor("sure-dialog");
}

async function askForKeys() {
  if (byId("keys-dialog").open) return;
  byId("admin-key").value = keys.admin; byId("api-key").value = keys.api;
  if (await askFor("keys-dialog")) { keys.set(byId("admin-key").value, byId("api-key").value); soon(); }
}

async function drain(id, isUndone) {
  if (isUndone) return act(`Bring ${id} back`, () => admin("POST", `/instances/${id}/undrain`));
  const text = "Its requests move away or finish, then it exits. It stays away until it is brought back.";
  if (await isSure(`Drain ${id}?`, text, "Drain")) await act(`Drain ${id}`, () => admin("POST", `/instances/${id}/drain`));
}

const path = (name) => name.split("/").map(encodeURIComponent).join("/");
const scaleModel = (name, replicas) => act(`${name} on ${replicas ?? "all"}`, () => admin("POST", `/models/${path(name)}/scale`, {replicas}));

async function removeModel(name) {
  const text = "Requests for it are refused from now on; those that run get their grace.";
  if (await isSure(`Remove ${name}?`, text, "Remove")) await act(`Remove ${name}`, () => admin("DELETE", `/models/${path(name)}`));
}

async function changePlan(action) {
  const text = "Models are loaded and unloaded one after the other; streams go on.";
  if (action === "search" || (await isSure(action === "apply" ? "Apply the proposed plan?" : "Roll the last change back?", text, "Do it"))) {
    await act({search: "Search for a plan", apply: "Apply the plan", roll_back: "Roll back"}[action], () => admin("POST", "/plan", {action}));
  }
}

async function addModel() {
  const base = byId("model-base");
  base.replaceChildren(base.options[0], ...served.map((name) => element("option", {value: name}, name)));
  chooseBase();
  if (!(await askFor("model-dialog"))) return;
  const [name, source, replicas] = ["model-name", "model-source", "model-replicas"].map((id) => byId(id).value.trim());
  const more = base.value ? {base: base.value} : replicas ? {replicas: Number(replicas)} : {};
  await act(`Add ${name}`, () => admin("POST", "/models", {name, source, ...more}));
}

/** An adapter is wherever its base model is. */
function chooseBase() { byId("model-replicas").disabled = byId("model-base").value !== ""; }

// ---------------------------------------------------------------------------------------------- one request, tabs

async function openRequest(id) {
  selectTab(byId("tab-requests"));
  shownRequest = id;
  byId("find-id").value = id;
  await lookAtTimeline();
  byId("timeline").focus();
}

function closeRequest() {
  shownRequest = "";
  byId("timeline").hidden = true;
  byId("find-id").focus();
}

const tabs = [...document.querySelectorAll('[role="tab"]')];

function selectTab(chosen) {
  for (const tab of tabs) {
    const isChosen = tab === chosen;
    tab.setAttribute("aria-selected", isChosen);
    tab.tabIndex = isChosen ? 0 : -1;
    byId(tab.getAttribute("aria-controls")).hidden = !isChosen;
  }
  soon();
}

tabs.forEach((tab, index) => {
  tab.addEventListener("click", () => selectTab(tab));
  tab.addEventListener("keydown", (event) => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!step) return;
    const next = tabs[(index + step + tabs.length) % tabs.length];
    next.focus(); selectTab(next); event.preventDefault();
  });
});

// ----------------------------------------------------------------------------------------------------- settings

const prefersDark = matchMedia("(prefers-color-scheme: dark)");

function setTheme() {
  const chosen = localStorage.getItem("theme"), isDark = chosen ? chosen === "dark" : prefersDark.matches;
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  byId("theme").setAttribute("aria-pressed", isDark);
  drawAll();
  drawHistory();
}

byId("theme").addEventListener("click", () => {
  localStorage.setItem("theme", document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  setTheme();
});
// Not of type submit, so that Enter in a field is the other button.
for (const button of document.querySelectorAll("dialog .cancel")) button.addEventListener("click", () => button.closest("dialog").close("cancel"));
prefersDark.addEventListener("change", setTheme);
addEventListener("resize", () => { drawAll(); drawHistory(); });
document.addEventListener("visibilitychange", turn);
byId("key").addEventListener("click", askForKeys);
byId("add-model").addEventListener("click", addModel);
byId("model-base").addEventListener("change", chooseBase);
byId("timeline-close").addEventListener("click", closeRequest);
byId("only-missed").addEventListener("change", soon);
byId("find").addEventListener("submit", (event) => { event.preventDefault(); const id = byId("find-id").value.trim(); if (id) openRequest(id); });
byId("scale-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const instances = Number(byId("num-instances").value);
  byId("num-instances").value = "";
  act(`${instances} instances`, () => admin("POST", "/scale", {instances}));
});

setTheme();
setUpChat(openRequest);
turn();
setInterval(turn, STATE_MS);
