// What this page has seen in the last minutes, as lines.

import {byId, element, keyed, resolved} from "./dom.js";

const KEPT_S = 180, COLOURS = ["--p-run", "--p-wait", "--p-lost", "--p-move", "--p-again", "--p-own"];
const seen = [];
/** {at_s, requests: {name: number}, pools: {instance: share}}, the oldest first. */

export function remember(state) {
  const sum = (of) => state.instances.reduce((total, one) => total + (one.load ? of(one.load) : 0), 0);
  const queued = (state.queues ?? []).reduce((total, queue) => total + queue.online + queue.offline, 0);
  seen.push({
    at_s: state.now_s,
    requests: {running: sum((load) => load.num_running), "waiting and queued": sum((load) => load.num_waiting) + queued, offline: sum((load) => load.num_offline)},
    pools: Object.fromEntries(state.instances.filter((one) => one.load?.pool_use !== null && one.load).map((one) => [one.instance_id, one.load.pool_use])),
  });
  while (seen[0].at_s < state.now_s - KEPT_S) seen.shift();
  drawHistory();
}

export function drawHistory() {
  lines("chart-requests", "keys-requests", (one) => one.requests, 5, (value) => `${Math.round(value)}`);
  lines("chart-pools", "keys-pools", (one) => one.pools, 1, (value) => `${Math.round(100 * value)} %`);
}

function lines(chartId, keysId, valuesOf, least, text) {
  if (!seen.length) return;
  const canvas = byId(chartId), width = canvas.clientWidth, height = canvas.clientHeight, scale = devicePixelRatio || 1;
  if (!width) return;
  const names = [...new Set(seen.flatMap((one) => Object.keys(valuesOf(one))))].slice(0, COLOURS.length);
  const last = seen.at(-1), most = Math.max(least, ...seen.flatMap((one) => Object.values(valuesOf(one))));
  canvas.width = width * scale; canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = "10px system-ui, sans-serif"; pen.textBaseline = "middle"; pen.lineWidth = 1;
  const top = 6, bottom = height - 6, x = (at_s) => width - ((last.at_s - at_s) / KEPT_S) * (width - 42), y = (value) => bottom - (value / most) * (bottom - top);
  for (const share of [0, 0.5, 1]) {
    pen.strokeStyle = resolved("--line"); pen.fillStyle = resolved("--dim");
    pen.beginPath(); pen.moveTo(40, y(most * share)); pen.lineTo(width, y(most * share)); pen.stroke();
    pen.textAlign = "right"; pen.fillText(text(most * share), 36, y(most * share));
  }
  names.forEach((name, index) => {
    pen.strokeStyle = resolved(COLOURS[index]); pen.lineWidth = 1.75; pen.lineJoin = "round";
    pen.beginPath();
    let isOpen = false;
    for (const one of seen) {
      const value = valuesOf(one)[name];
      if (value === undefined) { isOpen = false; continue; }
      if (isOpen) pen.lineTo(x(one.at_s), y(value)); else pen.moveTo(x(one.at_s), y(value));
      isOpen = true;
    }
    pen.stroke();
  });
  keyed(byId(keysId), names.map((name, index) => ({name, index})), (item) => item.name,
    (item) => element("span", {}, element("i", {class: "swatch", style: {background: `var(${COLOURS[item.index]})`}}), item.name), () => {});
  canvas.setAttribute("aria-label", names.map((name) => `${name} ${text(valuesOf(last)[name] ?? 0)}`).join(", "));
}
