// The console: asks the gateway once a second what there is, and draws it. Nothing is asked for while nobody looks.

import {admin, keys} from "./api.js";
import {setUpChat, showChatModels} from "./chat.js";
import {byId, element, keyed, put} from "./dom.js";
import {drawAll, showInstances} from "./instances.js";
import {drawHistory, recall, remember} from "./history.js";
import {showAudit, showRoutes, showTenants} from "./lists.js";
import {linkTo, showRequests, showSlo, showTimeline} from "./requests.js";
import {showAdapters, showBatch, showBatches, showModels, showPlan, showQueues} from "./side.js";

const STATE_MS = 1000, SLOW_MS = 4000, HISTORY_MS = 10000;
let shownRequest = "", shownBatch = "";
let served = [];
/** Names of the models that can be. */
let isAsking = false;
let numReady = 0;
/** Instances that serve and are not drained. */

/** `passes`: looking again, with success, takes it away. */
function say(text, isBad = false, passes = false) {
  const news = byId("news");
  put(news, text);
  news.className = isBad ? "bad" : "";
  news.dataset.passes = passes;
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
  numReady = state.instances.filter((one) => one.state === "ready" && !state.draining.includes(one.instance_id)).length;
  showInstances(state, {onDrain: drain, onRequest: openRequest});
  showQueues(state.queues);
  showBatches(state.batches, state.now_s, openBatch);
  remember(state);
  if (document.activeElement !== byId("num-instances")) byId("num-instances").placeholder = state.instances.length;
  if (!byId("panel-requests").hidden) await lookAtRequests();
}

async function lookAtRequests() {
  const query = new URLSearchParams({
    limit: 60, missed: byId("only-missed").checked, running: byId("filter-state").value === "running", model: byId("filter-model").value,
  });
  showRequests((await admin("GET", `/requests?${query}`)).requests);
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
    if (error.status === 401) return;  // it is shown once there is a key
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
  const names = [...served, ...adapters.filter((adapter) => served.includes(adapter.base)).map((adapter) => adapter.name)];
  showChatModels(names);
  const filter = byId("filter-model");
  keyed(filter, ["", ...names], (name) => name, (name) => element("option", {value: name}, name || "all"), () => {});
  if (shownBatch) await lookAtBatch();
  for (const [panel, path, show] of TABS) if (!byId(panel).hidden) show(await admin("GET", path));
  if (performance.now() - historyAt > HISTORY_MS) { recall((await admin("GET", "/console/history")).samples); historyAt = performance.now(); }
}

/** Panels that are filled only while they are shown. */
const TABS = [
  ["panel-slo", "/slo?interval_s=300", showSlo], ["panel-routes", "/routes", ({routes}) => showRoutes(routes)],
  ["panel-tenants", "/tenants", ({tenants}) => showTenants(tenants)], ["panel-audit", "/audit", ({actions}) => showAudit(actions)],
];

async function lookAtBatch() {
  const asked = shownBatch;
  const detail = await admin("GET", `/batches/${encodeURIComponent(asked)}`);
  if (shownBatch === asked) showBatch(detail);
}

let slowAt = 0, historyAt = -HISTORY_MS;

async function turn() {
  if (isAsking || document.hidden || byId("keys-dialog").open) return;
  isAsking = true;
  try {
    await look();
    if (performance.now() - slowAt > SLOW_MS) { await lookSlowly(); slowAt = performance.now(); }
    if (byId("news").dataset.passes === "true") say("");
  } catch (error) {
    say(error.message, true, true);
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
  const isLast = numReady === 1;
  const text = `Its requests move away or finish, then it exits. It stays away until it is brought back.${isLast ? " No other instance serves: requests will wait until their deadlines." : ""}`;
  const work = () => admin("POST", `/instances/${id}/drain${isLast ? "?force=true" : ""}`);
  if (await isSure(`Drain ${id}${isLast ? ", the last instance" : ""}?`, text, "Drain")) await act(`Drain ${id}`, work);
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
  put(byId("model-refusal"), "");
  if (await askFor("model-dialog")) soon();
}

/** The dialog stays open, with what was typed, until the model is taken. */
async function sendModel(event) {
  event.preventDefault();
  const [name, source, replicas, base] = ["model-name", "model-source", "model-replicas", "model-base"].map((id) => byId(id).value.trim());
  const more = base ? {base} : {...(replicas ? {replicas: Number(replicas)} : {}), ...(byId("model-on-demand").checked ? {on_demand: true} : {})};
  const button = byId("model-add");
  put(byId("model-refusal"), ""); put(button, "Adding …"); button.disabled = true;
  try {
    await admin("POST", "/models", {name, source, ...more});
    say(`Add ${name}: done`);
    byId("model-form").reset();
    byId("model-dialog").close("ok");
  } catch (error) { put(byId("model-refusal"), error.message); }
  finally { put(button, "Add"); button.disabled = false; }
}

/** An adapter is wherever its base model is. */
function chooseBase() { for (const id of ["model-replicas", "model-on-demand"]) byId(id).disabled = byId("model-base").value !== ""; }

// ----------------------------------------------------------------------------- one batch, one request, tabs

async function openBatch(id) {
  shownBatch = id;
  try { await lookAtBatch(); byId("batch").focus(); }
  catch (error) { shownBatch = ""; say(error.message, true); }
}

function closeBatch() { shownBatch = ""; byId("batch").hidden = true; }

async function cancelBatch() {
  const id = shownBatch, text = "What runs of it ends within seconds; what is done stays in its output file.";
  if (await isSure(`Cancel ${id}?`, text, "Cancel it")) await act(`Cancel ${id}`, () => admin("POST", `/batches/${encodeURIComponent(id)}/cancel`));
}

/** The request that the address names is shown; so addresses can be sent, and going back goes back. */
function followAddress() {
  const named = new URLSearchParams(location.hash.slice(1)).get("request");
  if (named) showRequest(named);
  else { shownRequest = ""; byId("timeline").hidden = true; }
}

function openRequest(id) {
  if (location.hash === linkTo(id)) showRequest(id);
  else location.hash = linkTo(id);
}

async function showRequest(id) {
  selectTab(byId("tab-requests"));
  shownRequest = id;
  byId("find-id").value = id;
  await lookAtTimeline();
  byId("timeline").focus();
}

function closeRequest() {
  location.hash = "";
  byId("find-id").focus();
}

async function copyLink() {
  const link = `${location.origin}${location.pathname}${linkTo(shownRequest || byId("find-id").value)}`;
  try { await navigator.clipboard.writeText(link); say(`Copied: ${link}`); }
  catch { say(link); }  // no clipboard without TLS
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
byId("timeline-copy").addEventListener("click", copyLink);
byId("batch-close").addEventListener("click", closeBatch);
byId("batch-cancel").addEventListener("click", cancelBatch);
byId("model-form").addEventListener("submit", sendModel);
byId("history-range").addEventListener("change", drawHistory);
byId("filters").addEventListener("submit", (event) => event.preventDefault());
for (const id of ["only-missed", "filter-model", "filter-state"]) byId(id).addEventListener("change", soon);
addEventListener("hashchange", followAddress);
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
followAddress();
setInterval(turn, STATE_MS);
