// The middle column: queues, models, placement, batches.

import {byId, colourOf, element, keyed, percent, put, seconds, table} from "./dom.js";

const dot = (model) => element("i", {class: "swatch", style: {background: colourOf(model)}});

export function showQueues(queues) {
  const container = byId("queues");
  if (queues === null) { container.replaceChildren(element("p", {class: "bad"}, "No scheduler says.")); return; }
  if (container.className !== "pairs") container.replaceChildren();
  container.className = "pairs";
  const most = Math.max(10, ...queues.map((queue) => queue.online + queue.offline));
  const cells = queues.flatMap((queue) => [{...queue, part: "name"}, {...queue, part: "bar"}, {...queue, part: "count"}]);
  keyed(container, cells, (cell) => `${cell.model} ${cell.part}`, (cell) => {
    if (cell.part === "name") return element("span", {}, dot(cell.model), cell.model);
    if (cell.part === "bar") return element("div", {class: "bar", role: "img"}, element("i", {}), element("i", {class: "offline"}));
    return element("span", {class: "dim"});
  }, (child, cell) => {
    if (cell.part === "bar") {
      child.setAttribute("aria-label", `${cell.online} online and ${cell.offline} offline requests wait`);
      [cell.online, cell.offline].forEach((number, index) => {
        child.children[index].style.width = `${(100 * number) / most}%`;
        child.children[index].style.setProperty("--of", colourOf(cell.model));
      });
    } else if (cell.part === "count") put(child, `${cell.online} online, ${cell.offline} offline`);
  });
}

export function showModels(models, {onScale, onRemove}) {
  const online = (model) => model.traffic?.online;
  const numberOf = (model) => model.replicas ?? Object.keys(model.instances).length;
  const columns = [
    ["model", (model) => ({key: model.name, make: () => [dot(model.name), model.name]}), {class: "name"}],
    ["on", (model) => {
      const ready = Object.values(model.instances).filter((state) => state === "ready").length;
      return ready === Object.keys(model.instances).length ? `${ready}` : `${ready}/${Object.keys(model.instances).length}`;
    }],
    ["run+wait", (model) => `${model.num_running}+${model.num_waiting + (model.num_queued ?? 0)}`],
    ["req/s", (model) => online(model)?.arrivals_per_s.toFixed(2) ?? "–"],
    ["TTFT P99", (model) => (online(model)?.num_finished ? seconds(online(model).ttft_s.p99) : "–")],
    ["TPOT", (model) => (online(model)?.num_finished ? seconds(online(model).tpot_s.mean) : "–")],
    ["in SLO", (model) => percent(online(model)?.attainment)],
    ["", (model) => ({key: `${model.name} ${numberOf(model)}`, make: () => {
      const number = numberOf(model);
      const button = (text, label, act, off = false) => element("button", {class: "tiny", type: "button", "aria-label": label, title: label, onclick: act, disabled: off}, text);
      return [
        button("−", `${model.name} on one instance less`, () => onScale(model.name, number - 1), number <= 1), " ",
        button("+", `${model.name} on one instance more`, () => onScale(model.name, number + 1)), " ",
        button("×", `Remove ${model.name}`, () => onRemove(model.name)),
      ];
    }})],
  ];
  table(byId("models"), "Models and their traffic in the last minute", columns, models, (model) => model.name);
  const problems = models.filter((model) => model.failure ?? model.unplaced);
  let note = byId("models").querySelector("p");
  if (!note) byId("models").append(note = element("p", {class: "bad small"}));
  put(note, problems.map((model) => `${model.name}: ${model.failure ?? model.unplaced}`).join("; "));
}

/** LoRA adapters: models of their own to clients; they run and wait as their base models' requests. */
export function showAdapters(adapters, {onRemove}) {
  const container = byId("adapters"), online = (adapter) => adapter.traffic?.online;
  container.hidden = !adapters.length;
  table(container, "LoRA adapters and their traffic in the last minute", [
    ["adapter", (adapter) => ({key: adapter.name, make: () => [dot(adapter.name), adapter.name]}), {class: "name"}],
    ["of", (adapter) => adapter.base],
    ["rank", (adapter) => adapter.rank],
    ["loaded on", (adapter) => adapter.loaded_on.length],
    ["req/s", (adapter) => online(adapter)?.arrivals_per_s.toFixed(2) ?? "–"],
    ["TTFT P99", (adapter) => (online(adapter)?.num_finished ? seconds(online(adapter).ttft_s.p99) : "–")],
    ["in SLO", (adapter) => percent(online(adapter)?.attainment)],
    ["", (adapter) => ({key: adapter.name, make: () => {
      const label = `Remove ${adapter.name}`;
      return element("button", {class: "tiny", type: "button", "aria-label": label, title: label, onclick: () => onRemove(adapter.name)}, "×");
    }})],
  ], adapters, (adapter) => adapter.name);
}

const groups = (plan) => plan.instances.map((one) => `${one.instance_id}: ${one.models.map((model) => model.name).join(", ") || "nothing"}`);

/** Predicted against measured: of the interval that runs, and what a search proposes. */
export function showPlan(plan, {onPlan}) {
  const container = byId("plan"), told = plan?.replacement;
  if (!plan) { container.replaceChildren(element("p", {class: "dim"}, "There is no plan yet.")); return; }
  const share = (prediction) => (prediction ? percent(prediction.attainment ?? null) : "–");
  const latency = (prediction) => (prediction?.normalised_latency ? prediction.normalised_latency.toFixed(2) : "–");
  const proposal = told?.proposal;
  const rows = [
    {name: "this interval, predicted", of: told?.predicted}, {name: "this interval, measured", of: told?.measured},
    ...(proposal ? [{name: "last search's, measured", of: proposal.measured}, {name: "as it is, predicted", of: proposal.incumbent}, {name: "proposed, predicted", of: proposal.prediction}] : []),
  ];
  const key = JSON.stringify([plan.version, rows.map((row) => [share(row.of), latency(row.of)]), told?.searching, told?.problem, proposal?.verdict, plan.change?.stage]);
  if (container.dataset.made === key) return;
  const focused = container.contains(document.activeElement) ? document.activeElement.textContent : null;
  const made = element("table", {}, element("caption", {}, "Predicted against measured"),
    element("thead", {}, element("tr", {}, ["", "within SLO", "latency / execution"].map((text) => element("th", {scope: "col"}, text)))),
    element("tbody", {}, rows.map((row) => element("tr", {}, element("td", {}, row.name), element("td", {}, share(row.of)), element("td", {}, latency(row.of))))));
  const act = (action, text) => element("button", {type: "button", class: "tiny", onclick: () => onPlan(action)}, text);
  const words = [told?.searching && `searching (${told.searching})`, told?.problem, proposal?.verdict, plan.change && `last change: ${plan.change.stage.replace("_", " ")}, ${plan.change.reason}`];
  container.dataset.made = key;
  container.replaceChildren(
    element("p", {class: "small dim", title: groups(plan).join("\n")}, `Version ${plan.version}, ${plan.is_chosen ? "chosen by a search" : "every model wherever it fits"}, replacement ${told?.mode ?? "unknown"}`),
    made, element("p", {class: "small"}, words.filter(Boolean).join("; ")),
    element("div", {}, act("search", "Search"), " ", act("apply", "Apply"), " ", act("roll_back", "Roll back")));
  if (focused) [...container.querySelectorAll("button")].find((button) => button.textContent === focused)?.focus();
}

export function showBatches(batches, nowS) {
  const container = byId("batches");
  if (!batches.length) { put(container, "None."); return; }
  if (!container.querySelector("table")) container.replaceChildren();
  const ahead = (atS) => (atS - nowS > 0 ? `in ${seconds(atS - nowS)}` : "now");
  table(container, "Batches", [
    ["batch", (batch) => `…${batch.batch_id.slice(-8)}`, {class: "name"}],
    ["status", (batch) => batch.status.replace("_", " ")],
    ["done", (batch) => `${batch.num_completed + batch.num_failed} of ${batch.num_total}${batch.num_failed ? ` (${batch.num_failed} failed)` : ""}`],
    ["", (batch) => ({key: `${batch.num_completed} ${batch.num_failed} ${batch.num_total}`, make: () => {
      const share = batch.num_total ? (batch.num_completed + batch.num_failed) / batch.num_total : 0;
      const bar = element("div", {class: "bar", role: "progressbar", "aria-valuenow": Math.round(100 * share), "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": `Batch ${batch.batch_id}`, style: {width: "90px"}}, element("i", {style: {width: `${100 * share}%`}}));
      return bar;
    }})],
    ["predicted end", (batch) => (batch.predicted_finish_s && !["completed", "failed", "expired", "cancelled"].includes(batch.status) ? ahead(batch.predicted_finish_s) : "–")],
  ], batches, (batch) => batch.batch_id);
}
