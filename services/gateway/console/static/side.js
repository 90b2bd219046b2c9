// The middle column: queues, models, placement, batches.

import {action, byId, clock, colourOf, element, keyed, percent, put, seconds, table} from "./dom.js";

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

/** What is worth a word beside a model's name: another engine, and where one is that is loaded on demand. */
function about(model) {
  const where = {host: "put away, in host memory", disk: "put away, on disk"}[model.state] ?? model.state;
  const why = model.why_asleep && model.why_asleep !== "idle" ? ` (${model.why_asleep})` : "";
  return [
    model.engine !== "native" && `engine ${model.engine}`, model.quantization,
    model.on_demand && `on demand: ${where}${why}`,
  ].filter(Boolean).join("; ");
}

export function showModels(models, {onScale, onRemove}) {
  const online = (model) => model.traffic?.online;
  const numberOf = (model) => model.replicas ?? Object.keys(model.instances).length;
  const columns = [
    ["model", (model) => ({key: `${model.name} ${about(model)}`, make: () => [dot(model.name), element("span", {title: `${model.name}\n${model.source}`}, model.name),
      about(model) && element("small", {title: about(model)}, about(model))]}), {class: "name"}],
    ["on", (model) => {
      const ready = Object.values(model.instances).filter((state) => state === "ready").length;
      return ready === Object.keys(model.instances).length ? `${ready}` : `${ready}/${Object.keys(model.instances).length}`;
    }],
    ["run+wait", (model) => `${model.num_running}+${model.num_waiting + (model.num_queued ?? 0)}`],
    ["req/s", (model) => online(model)?.arrivals_per_s.toFixed(2) ?? "–"],
    ["TTFT P99", (model) => (online(model)?.num_finished ? seconds(online(model).ttft_s.p99) : "–"), {class: "roomy"}],
    ["TPOT", (model) => (online(model)?.num_finished ? seconds(online(model).tpot_s.mean) : "–"), {class: "spare"}],
    ["gap P99", (model) => (online(model)?.num_finished ? seconds(online(model).max_itl_s.p99) : "–"), {class: "spare"}],
    ["in SLO", (model) => percent(online(model)?.attainment)],
    ["", (model) => ({key: `${model.name} ${numberOf(model)}`, make: () => {
      const number = numberOf(model);
      return [
        action("−", `${model.name} on one instance less`, () => onScale(model.name, number - 1), number <= 1), " ",
        action("+", `${model.name} on one instance more`, () => onScale(model.name, number + 1)), " ",
        action("×", `Remove ${model.name}`, () => onRemove(model.name)),
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
    ["", (adapter) => ({key: adapter.name, make: () => action("×", `Remove ${adapter.name}`, () => onRemove(adapter.name))})],
  ], adapters, (adapter) => adapter.name);
}

const groups = (plan) => plan.instances.map((one) => `${one.instance_id}: ${one.models.map((model) => model.name).join(", ") || "nothing"}`);

/** Predicted against measured: of the interval that runs, and what a search proposes. */
export function showPlan(plan, {onPlan}) {
  const container = byId("plan"), told = plan?.replacement;
  if (!plan) { container.replaceChildren(element("p", {class: "dim"}, "There is no plan yet.")); return; }
  const hasAny = (prediction) => Object.values(prediction?.models ?? {}).some((model) => model.num_requests);
  const share = (prediction) => (hasAny(prediction) ? percent(prediction.attainment) : "–");
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
  container.replaceChildren(...[
    element("p", {class: "small dim", title: groups(plan).join("\n")}, `Version ${plan.version}, ${plan.is_chosen ? "chosen by a search or an operator" : "every model wherever it fits"}, replacement ${told?.mode ?? "unknown"}`),
    made, told?.predicted && element("p", {class: "small dim"}, "Predicted: for the traffic that the search saw. Measured: the requests that have come since."),
    element("p", {class: "small"}, words.filter(Boolean).join("; ")),
    element("div", {}, act("search", "Search"), " ", act("apply", "Apply"), " ", act("roll_back", "Roll back"))].filter(Boolean));
  if (focused) [...container.querySelectorAll("button")].find((button) => button.textContent === focused)?.focus();
}

const OVER = ["completed", "failed", "expired", "cancelled"];

/** What a batch that was ended did not come to is no failure of its lines. */
const wasEnded = (batch) => ["cancelled", "expired"].includes(batch.status);

function told(batch) {
  const [done, failed] = [batch.num_completed, batch.num_failed];
  if (wasEnded(batch)) return `${done} of ${batch.num_total}, ${batch.num_total - done} not`;
  return `${done + failed} of ${batch.num_total}${failed ? ` (${failed} failed)` : ""}`;
}

export function showBatches(batches, nowS, onBatch) {
  const container = byId("batches");
  if (!batches.length) { put(container, "None."); return; }
  if (!container.querySelector("table")) container.replaceChildren();
  const ahead = (atS) => (atS - nowS > 0 ? `in ${seconds(atS - nowS)}` : "now");
  table(container, "Batches", [
    ["batch", (batch) => ({key: batch.batch_id, make: () => element("button", {class: "link", type: "button", title: batch.batch_id, onclick: () => onBatch(batch.batch_id)}, `…${batch.batch_id.slice(-8)}`)}), {class: "name"}],
    ["status", (batch) => batch.status.replace("_", " ")],
    ["done", told],
    ["", (batch) => ({key: `${batch.status} ${batch.num_completed} ${batch.num_failed} ${batch.num_total}`, make: () => {
      const [done, failed] = [batch.num_completed, wasEnded(batch) ? 0 : batch.num_failed].map((number) => (batch.num_total ? (100 * number) / batch.num_total : 0));
      return element("div", {class: "bar", role: "progressbar", "aria-valuenow": Math.round(done), "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": `Batch ${batch.batch_id}`, style: {width: "50px"}},
        element("i", {style: {width: `${done}%`}}), element("i", {class: "failed", style: {width: `${failed}%`}}));
    }}), {class: "roomy"}],
    ["predicted end", (batch) => (batch.predicted_finish_s && !OVER.includes(batch.status) ? ahead(batch.predicted_finish_s) : "–")],
  ], batches, (batch) => batch.batch_id);
}

/** `detail`: as GET /admin/batches/{id} has it. */
export function showBatch(detail) {
  const {batch, failures} = detail, counts = batch.request_counts;
  byId("batch").hidden = false;
  byId("batch-cancel").disabled = !["validating", "in_progress", "finalizing"].includes(batch.status);
  const times = [["created", detail.created_s], ...Object.entries(detail.status_s)].sort((a, b) => a[1] - b[1]);
  const lines = [
    `${batch.endpoint}${batch.model ? `, ${batch.model}` : ""}, ${detail.tenant ? `tenant ${detail.tenant}` : "no tenant"}; ${counts.completed} of ${counts.total} done, ${counts.failed} failed`,
    times.map(([status, atS]) => `${status.replace("_", " ")} ${clock(atS)}`).join(", "),
    `files: input ${batch.input_file_id}${batch.output_file_id ? `, output ${batch.output_file_id}` : ""}${batch.error_file_id ? `, errors ${batch.error_file_id}` : ""}`,
  ];
  if (batch.waiting_for) lines.push(`waits: ${batch.waiting_for.message}`);
  const problems = (batch.errors?.data ?? []).map((one) => `${one.line ? `line ${one.line}: ` : ""}${one.message}`);
  byId("batch-shown").replaceChildren(element("h3", {}, batch.id), ...lines.map((line) => element("div", {class: "small dim"}, line)),
    ...problems.map((text) => element("div", {class: "bad small"}, text)),
    ...(failures.length ? [element("div", {class: "small"}, `The first ${failures.length} lines of the error file:`), element("pre", {tabindex: 0}, failures.map(failure).join("\n"))] : []));
}

function failure(line) {
  try {
    const one = JSON.parse(line), error = one.error ?? one.response?.body?.error;
    return `${one.custom_id}: ${error?.message ?? line}`;
  } catch { return line; }
}
