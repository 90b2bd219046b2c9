// The instances: the KV pool of each block by block, its sequences as cells, host memory, and requests that move between them.

import {byId, colourOf, element, keyed, percent, put, resolved} from "./dom.js";

const GAP = 1, LEAST_CELL = 4, MOST_CELL = 18, MOST_HEIGHT = 132;
const NO_POOL = {models: [], owners: "", use: "", host_owners: "", host_use: "", sequences: [], num_sequences: 0};
const pools = new WeakMap();
/** By panel: what its canvases show, to be drawn again when the width or the theme changes. */
let pointedAt = null;
/** The sequence under the pointer or focus: its merged blocks are drawn with a frame. */

const bytes = (base64) => Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));

export function showInstances(state, {onDrain, onRequest}) {
  const draining = new Set(state.draining);
  const gone = state.draining.filter((id) => !state.instances.some((one) => one.instance_id === id));
  const items = [...state.instances, ...gone.map((id) => ({instance_id: id, state: "drained", models: [], load: null}))];
  keyed(byId("instances"), items, (item) => item.instance_id, create, (panel, item) => {
    const isOut = draining.has(item.instance_id);
    update(panel, item, isOut, state.pools[item.instance_id], onRequest);
    const button = panel.querySelector(".drain");
    put(button, isOut ? "Bring back" : "Drain");
    button.onclick = () => onDrain(item.instance_id, isOut);
  });
  showMoves(state.moves);
}

function create(item) {
  return element("article", {class: "card instance", id: `instance-${item.instance_id}`, "aria-labelledby": `name-${item.instance_id}`},
    element("header", {}, element("h3", {id: `name-${item.instance_id}`}, item.instance_id), element("span", {class: "badge"}),
      element("span", {class: "dim small where"}), element("span", {class: "actions"}, element("button", {class: "drain tiny", type: "button"}))),
    element("div", {class: "row"}, element("span", {}, "KV pool"), element("canvas", {class: "pool", role: "img"})),
    element("div", {class: "row"}, element("span", {}, "host"), element("canvas", {class: "host", role: "img"})),
    element("div", {class: "row"}, element("span", {}, "sequences"), element("div", {class: "cells", role: "group", "aria-label": `Sequences of ${item.instance_id}`})),
    element("div", {class: "numbers"}));
}

function update(panel, item, isOut, pool, onRequest) {
  const badge = panel.querySelector(".badge"), state = isOut && item.state === "ready" ? "draining" : item.state;
  put(badge, state);
  panel.classList.toggle("out", state === "drained");
  badge.className = `badge ${{ready: "good", draining: "warn", drained: "dim"}[state] ?? "warn"}`;
  const where = item.devices?.length ? `${item.device}${item.devices.length > 1 ? ` × ${item.devices.length}` : ""}` : "";
  const role = item.role && item.role !== "both" ? `${item.role}${item.is_role_fixed ? " (fixed)" : ""}` : "";
  const isForeign = item.engine && item.engine !== "native";
  put(panel.querySelector(".where"), [where, isForeign && `engine ${item.engine}`, role].filter(Boolean).join(", "));
  // Engines of others do not show their blocks.
  for (const row of panel.querySelectorAll(".row")) row.hidden = isForeign;
  const view = pool ?? NO_POOL;
  pools.set(panel, view);
  draw(panel);
  const cells = panel.querySelector(".cells");
  keyed(cells, view.sequences, (one) => one.request_id, (one) => {
    const cell = element("button", {type: "button", onclick: () => onRequest(one.request_id)});
    for (const [on, off] of [["pointerenter", "pointerleave"], ["focus", "blur"]]) {
      cell.addEventListener(on, () => { pointedAt = one.request_id; draw(panel); });
      cell.addEventListener(off, () => { pointedAt = null; draw(panel); });
    }
    return cell;
  }, (cell, one) => {
    const model = view.models[one.model];
    const kind = `${one.state}${one.is_online ? "" : " offline"}`;
    if (cell.className !== kind) cell.className = kind;
    cell.style.setProperty("--of", colourOf(model));
    const held = `${one.num_tokens} tokens, ${one.num_blocks} KV blocks${one.num_host_blocks ? `, ${one.num_host_blocks} of them in host memory too` : ""}`;
    cell.title = `${one.request_id}\n${model}, ${one.is_online ? "online" : "offline"}, ${one.state}: ${held}`;
    cell.setAttribute("aria-label", cell.title);
  });
  const load = item.load, numbers = load ? [
    ["running", load.num_running], ["waiting", load.num_waiting], ["offline", load.num_offline], ["pool", percent(load.pool_use)],
    ["steps left", load.migration_freeness === null ? "idle" : Math.round(load.migration_freeness)],
    ["moved", `${load.num_migrated_out} out, ${load.num_migrated_in} in`], ...copies(load.kv_copies), ...drafts(load.drafts),
  ] : [];
  keyed(panel.querySelector(".numbers"), numbers, ([name]) => name, ([name]) => element("span", {}, `${name} `, element("b", {})), (span, [, value]) => put(span.querySelector("b"), value));
}

/** Copies of KV between instances: only what there was of them. */
function copies(of) {
  if (!of) return [];
  return [
    (of.num_backed_up || of.backed_up_bytes) && ["backed up", `${of.num_backed_up} requests, ${(of.backed_up_bytes / 2 ** 20).toFixed(1)} MiB sent`],
    of.num_missing_blocks && ["not yet copied", `${of.num_missing_blocks} blocks`],
    of.num_kept && ["kept for others", `${of.num_kept} requests`],
    (of.num_rescued_tokens || of.num_recomputed_tokens) && ["after crashes", `${of.num_rescued_tokens} tokens kept, ${of.num_recomputed_tokens} computed again`],
    of.num_fetches && ["prefixes fetched", `${of.num_fetches}, ${of.num_fetched_blocks} blocks`],
  ].filter(Boolean);
}

/** Whether each draft model drafts, and what share of its tokens are kept. */
const drafts = (uses) => (uses ?? []).map((use) =>
  [`drafts of ${use.model}`, use.num_drafted ? `${use.state}, ${percent(use.num_kept / use.num_drafted)} kept` : use.state]);

function draw(panel) {
  const view = pools.get(panel);
  const marked = new Set(view.sequences.find((one) => one.request_id === pointedAt)?.merged ?? []);
  cells(panel.querySelector(".pool"), bytes(view.owners), bytes(view.use), view.models, marked, "Merged blocks of the KV pool");
  cells(panel.querySelector(".host"), bytes(view.host_owners), bytes(view.host_use), view.models, new Set(), "Merged blocks in host memory");
}

/** A rectangle a merged block, in its model's colour, the stronger the more of it is used; pale where it is only cached. */
function cells(canvas, owners, use, models, marked, what) {
  const width = canvas.parentElement.clientWidth - 72, count = owners.length, scale = devicePixelRatio || 1;
  if (width < 20) return;
  let size = MOST_CELL;
  while (size > LEAST_CELL && Math.ceil(count / Math.max(1, Math.floor(width / size))) * size > (what.includes("host") ? 40 : MOST_HEIGHT)) size -= 1;
  const perRow = Math.max(1, Math.floor(width / size)), height = Math.max(size, Math.ceil(count / perRow) * size);
  canvas.width = width * scale; canvas.height = height * scale; canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const colours = models.map((model) => resolved(resolvedName(model))), free = resolved("--free"), frame = resolved("--text");
  const used = models.map(() => 0);
  for (let index = 0; index < count; index += 1) {
    const owner = owners[index], x = (index % perRow) * size, y = Math.floor(index / perRow) * size;
    pen.globalAlpha = 1; pen.fillStyle = free; pen.fillRect(x, y, size - GAP, size - GAP);
    if (owner) {
      used[owner - 1] += use[index] / 255;
      pen.globalAlpha = use[index] ? 0.35 + (0.65 * use[index]) / 255 : 0.18;
      pen.fillStyle = colours[owner - 1]; pen.fillRect(x, y, size - GAP, size - GAP);
    }
    if (marked.has(index)) { pen.globalAlpha = 1; pen.strokeStyle = frame; pen.strokeRect(x + 0.5, y + 0.5, size - GAP - 1, size - GAP - 1); }
  }
  const text = models.map((model, index) => `${model} ${used[index].toFixed(1)}`).join(", ");
  const label = count ? `${what}: ${count}; used by ${text || "nobody"}` : `${what}: none`;
  if (canvas.title !== label) { canvas.title = label; canvas.setAttribute("aria-label", label); }
}

const resolvedName = (model) => colourOf(model);

export function drawAll() {
  for (const panel of byId("instances").children) if (pools.has(panel)) draw(panel);
}

const SVG = "http://www.w3.org/2000/svg";
const isCalm = matchMedia("(prefers-reduced-motion: reduce)");

/** A line from instance to instance for each request that moves, or has moved just now. */
function showMoves(moves) {
  const overlay = byId("moves"), left = byId("left");
  const box = left.getBoundingClientRect();
  overlay.style.height = `${left.scrollHeight}px`;
  const at = (id) => {
    const panel = document.getElementById(`instance-${id}`);
    if (!panel) return null;
    const of = panel.getBoundingClientRect();
    return [of.left - box.left + of.width / 2, of.top - box.top + left.scrollTop + of.height / 2];
  };
  const shown = moves.filter((move) => at(move.source_id) && at(move.destination_id));
  const known = new Map([...overlay.children].map((group) => [group.dataset.key, group]));
  for (const move of shown) {
    const [x1, y1] = at(move.source_id), [x2, y2] = at(move.destination_id);
    // Several between the same two lie beside each other.
    const bend = 0.15 + 0.45 * ((parseInt(move.request_id.slice(-8, -2), 16) % 97) / 97 || 0.2);
    const path = `M${x1},${y1} Q${(x1 + x2) / 2 - (y2 - y1) * bend},${(y1 + y2) / 2 + (x2 - x1) * bend} ${x2},${y2}`;
    let group = known.get(move.request_id);
    known.delete(move.request_id);
    if (!group) {
      group = document.createElementNS(SVG, "g");
      group.dataset.key = move.request_id;
      const line = document.createElementNS(SVG, "path"), dot = document.createElementNS(SVG, "circle"), title = document.createElementNS(SVG, "title");
      line.setAttribute("fill", "none"); line.setAttribute("stroke-width", "2"); line.setAttribute("stroke-dasharray", "5 4");
      dot.setAttribute("r", "6");
      if (!isCalm.matches) {
        const motion = document.createElementNS(SVG, "animateMotion");
        motion.setAttribute("dur", `${0.9 + Math.random() / 2}s`); motion.setAttribute("repeatCount", "indefinite");
        dot.append(motion);
      }
      group.append(title, line, dot);
      overlay.append(group);
    }
    const [title, line, dot] = group.children;
    const colour = move.outcome && move.outcome !== "moved" ? "var(--bad)" : "var(--p-move)";
    title.textContent = `${move.request_id}: ${move.source_id} to ${move.destination_id}, ${move.reason}, ${move.outcome || "under way"}`;
    line.setAttribute("d", path); line.style.stroke = colour; dot.style.fill = colour;
    group.style.opacity = move.outcome ? 0.55 : 1;
    if (dot.firstChild) dot.firstChild.setAttribute("path", path);
    else { dot.setAttribute("cx", x2); dot.setAttribute("cy", y2); }
  }
  for (const group of known.values()) group.remove();
}
