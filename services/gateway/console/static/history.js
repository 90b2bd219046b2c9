// The last minutes or the last hour, as lines: what gateways stored each ten seconds, and what this page saw each second since.

import {byId, clock, colourOf, element, keyed, resolved} from "./dom.js";

const LIVE_S = 180, GAP_S = 25, TICKS = 3, AXIS = 42, MOST_LINES = 6;
const COLOURS = ["--p-run", "--p-wait", "--p-lost", "--p-move", "--p-again", "--p-own"].map((name) => `var(${name})`);
const seen = [];
let stored = [];
/** Both: {at_s, requests: {name: number}, tokens?: {model: number}, pools: {instance: share}}, the oldest first. */

const rangeS = () => Number(byId("history-range").value);

export function remember(state) {
  const sum = (of) => state.instances.reduce((total, one) => total + (one.load ? of(one.load) : 0), 0);
  const queued = (state.queues ?? []).reduce((total, queue) => total + queue.online + queue.offline, 0);
  seen.push({
    at_s: state.now_s,
    requests: {running: sum((load) => load.num_running), "waiting and queued": sum((load) => load.num_waiting) + queued},
    pools: Object.fromEntries(state.instances.filter((one) => one.load?.pool_use !== null && one.load).map((one) => [one.instance_id, one.load.pool_use])),
  });
  while (seen[0].at_s < state.now_s - LIVE_S) seen.shift();
  drawHistory();
}

/** `samples`: as GET /admin/console/history has them. */
export function recall(samples) {
  stored = samples.map((one) => ({
    at_s: one.at_s, pools: one.pools, tokens: one.output_tokens_s,
    requests: {running: one.num_running, "waiting and queued": one.num_waiting + (one.num_queued ?? 0)},
  }));
  drawHistory();
}

export function drawHistory() {
  const now = seen.at(-1)?.at_s ?? stored.at(-1)?.at_s;
  if (now === undefined) return;
  const isShown = (one) => one.at_s >= now - rangeS(), begin = seen[0]?.at_s ?? Infinity;
  const all = [...stored.filter((one) => one.at_s < begin), ...seen].filter(isShown), slots = stored.filter(isShown);
  // A model that had no output in a slot had none, and is no gap.
  const models = [...new Set(slots.flatMap((one) => Object.keys(one.tokens)))];
  const tokens = slots.map((one) => ({at_s: one.at_s, tokens: Object.fromEntries(models.map((name) => [name, one.tokens[name] ?? 0]))}));
  lines("requests", now, all, (one) => one.requests, 4, inTurn, (value) => `${Math.round(value)}`);
  lines("tokens", now, tokens, (one) => one.tokens, 10, colourOf, (value) => (value < 9500 ? `${Math.round(value)}` : `${Math.round(value / 1000)}k`));
  lines("pools", now, all, (one) => one.pools, 1, inTurn, (value) => `${Math.round(100 * value)} %`);
}

/** The least of 1, 2, 4, 6, 8 and their tenfolds that is not less: its half and itself are round. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].map((one) => one * power).find((one) => one >= value - 1e-9);
}

const inTurn = (name, index) => COLOURS[index];

/** `colour`: that of a line, by its name and place: models have theirs everywhere. */
function lines(which, now, samples, valuesOf, least, colour, text) {
  const canvas = byId(`chart-${which}`), width = canvas.clientWidth, height = canvas.clientHeight, scale = devicePixelRatio || 1;
  if (!width) return;
  const names = [...new Set(samples.flatMap((one) => Object.keys(valuesOf(one))))].slice(0, MOST_LINES);
  const most = least === 1 ? 1 : roundUp(Math.max(least, ...samples.flatMap((one) => Object.values(valuesOf(one)))));
  canvas.width = width * scale; canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle"; pen.lineWidth = 1;
  const top = 7, bottom = height - 18, range = rangeS();
  const x = (at_s) => width - 2 - ((now - at_s) / range) * (width - AXIS - 2), y = (value) => bottom - (value / most) * (bottom - top);
  pen.strokeStyle = resolved("--line"); pen.fillStyle = resolved("--dim");
  for (const share of [0, 0.5, 1]) {
    pen.beginPath(); pen.moveTo(AXIS, y(most * share)); pen.lineTo(width, y(most * share)); pen.stroke();
    pen.textAlign = "right"; pen.fillText(text(most * share), AXIS - 5, y(most * share));
  }
  for (let tick = 0; tick < TICKS; tick += 1) {
    const at_s = now - range * (1 - tick / (TICKS - 1));
    pen.textAlign = ["left", "center", "right"][tick];
    pen.fillText(clock(at_s).slice(0, range > 300 ? 5 : 8), x(at_s), height - 7);
  }
  names.forEach((name, index) => {
    pen.strokeStyle = resolved(colour(name, index)); pen.lineWidth = 1.75; pen.lineJoin = "round";
    pen.beginPath();
    let last = -Infinity;
    for (const one of samples) {
      const value = valuesOf(one)[name];
      if (value === undefined) continue;
      if (one.at_s - last < GAP_S) pen.lineTo(x(one.at_s), y(value)); else pen.moveTo(x(one.at_s), y(value));
      last = one.at_s;
    }
    pen.stroke();
  });
  keyed(byId(`keys-${which}`), names.map((name, index) => ({name, colour: colour(name, index)})), (item) => item.name,
    (item) => element("span", {}, element("i", {class: "swatch"}), item.name),
    (span, item) => { span.firstChild.style.background = item.colour; });
  const last = samples.at(-1);
  canvas.setAttribute("aria-label", last ? names.map((name) => `${name} ${text(valuesOf(last)[name] ?? 0)}`).join(", ") : "nothing yet");
}
