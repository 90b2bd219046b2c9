// Requests that run or ended lately, the timeline of one, and what objectives that were missed cost.

import {byId, clock, colourOf, element, seconds, table} from "./dom.js";

/** The address of a request's timeline in this console, to be sent to somebody. */
export const linkTo = (id) => `#request=${encodeURIComponent(id)}`;

const COLOURS = {
  "gateway": "--p-way", "queue": "--p-wait", "dispatch": "--p-way", "instance queue": "--p-wait", "prefill": "--p-own", "prefill, others' steps": "--p-wait",
  "delivery": "--p-way", "decode": "--p-run", "decode, others' steps": "--p-wait", "preempted": "--p-lost", "recompute": "--p-again", "restore": "--p-again",
  "suspended": "--p-lost", "move": "--p-move", "rescue": "--p-lost",
};
const colour = (phase) => `var(${COLOURS[phase] ?? "--p-way"})`;

export function showRequests(requests) {
  const container = byId("requests");
  if (!requests.length) { container.replaceChildren(element("p", {class: "dim"}, "No request as the filters say runs, and none ended lately.")); return; }
  if (!container.querySelector("table")) container.replaceChildren();
  table(container, "Requests", [
    ["request", (one) => ({key: one.id, make: () => element("a", {href: linkTo(one.id), title: `${one.id}\n${one.model}`},
      element("i", {class: "swatch", style: {background: colourOf(one.model)}}), `…${one.id.slice(-10)}`)}), {class: "name"}],
    ["came at", (one) => clock(one.arrived_s), {class: "roomy"}],
    ["state", (one) => one.state], ["instance", (one) => one.instance_id || "–", {class: "roomy"}],
    ["TTFT", (one) => seconds(one.ttft_s)], ["time", (one) => seconds(one.duration_s)], ["tokens", (one) => `${one.prompt_tokens}+${one.output_tokens}`, {class: "roomy"}],
    ["", (one) => {
      const missed = one.objectives.filter((objective) => !objective.is_met).map((objective) => objective.name.toUpperCase());
      const met = [one.num_preemptions && `${one.num_preemptions} preempted`, one.num_moves && `${one.num_moves} moved`, one.num_losses && `${one.num_losses} rescued`];
      return {key: `${missed} ${met}`, make: () => [element("span", {class: "bad"}, missed.length ? `missed ${missed.join(", ")} ` : ""), element("span", {class: "dim"}, met.filter(Boolean).join(", "))]};
    }, {class: "text"}],
  ], requests, (one) => one.id);
}

/** `shown`: what the gateway says of the request's sequences. */
export function showTimeline(shown) {
  byId("timeline").hidden = false;
  byId("timeline-shown").replaceChildren(...shown.flatMap((one) => sequence(one)));
}

function sequence(one) {
  const parts = new Map();
  for (const phase of one.phases) parts.set(phase.phase, (parts.get(phase.phase) ?? 0) + phase.end_s - phase.begin_s);
  const sorted = [...parts].sort((a, b) => b[1] - a[1]).filter(([, of]) => of >= 0.005 * one.duration_s);
  const bar = element("div", {class: "phases", role: "img", "aria-label": sorted.map(([phase, of]) => `${phase} ${seconds(of)}`).join(", ")},
    one.phases.map((phase) => element("i", {title: `${phase.phase} ${seconds(phase.end_s - phase.begin_s)}${phase.where ? ` on ${phase.where}` : ""}`,
      style: {width: `${(100 * (phase.end_s - phase.begin_s)) / Math.max(1e-9, one.duration_s)}%`, background: colour(phase.phase)}})));
  return [
    element("h3", {}, one.id), element("div", {class: "dim"}, `${one.model}, ${one.request_class}, ${one.state}; came at ${clock(one.arrived_s)}; first token after ${seconds(one.ttft_s)}, ${seconds(one.duration_s)} in all; ${one.prompt_tokens} prompt and ${one.output_tokens} output tokens`),
    bar, element("div", {class: "words"}, sorted.map(([phase, of]) => [element("i", {class: "swatch", style: {background: colour(phase)}}), `${phase} ${seconds(of)}  `])  .flat()),
    ...one.objectives.map((objective) => element("div", {class: objective.is_met ? "good" : "bad"}, objective.text)),
    element("table", {}, element("caption", {}, `Events of ${one.id}`),
      element("thead", {}, element("tr", {}, ["after", "what", "by", ""].map((text) => element("th", {scope: "col"}, text)))),
      element("tbody", {}, one.events.map((event) => element("tr", {}, element("td", {}, seconds(Math.max(0, event.after_s))), element("td", {}, event.kind.replaceAll("_", " ")), element("td", {}, event.teller), element("td", {}, event.text))))),
  ];
}

export function showSlo(explained) {
  const container = byId("slo"), names = {ttft: "time to first token", tpot: "time per output token"};
  if (!explained.objectives.length) { container.replaceChildren(element("p", {class: "dim"}, "No request with an objective ended in the last five minutes.")); return; }
  container.replaceChildren(...explained.objectives.flatMap((one) => {
    const total = one.parts.reduce((sum, part) => sum + part.seconds, 0);
    const head = element("h3", {}, element("i", {class: "swatch", style: {background: colourOf(one.model)}}), `${one.model}, ${names[one.name]}`);
    const share = element("p", {class: one.num_missed ? "bad" : "good"}, `${one.num_missed} of ${one.num_judged} missed their objective (${seconds(one.objective_s)} on average${one.num_default === one.num_judged ? ", the default" : ""})${one.num_missed ? `: they took ${seconds(one.measured_s)} on average` : ""}`);
    const parts = one.parts.filter((part) => part.seconds >= 0.005 * total);
    const bars = element("div", {class: "pairs"}, parts.flatMap((part) => [
      element("span", {}, part.phase), element("div", {class: "bar"}, element("i", {style: {width: `${(100 * part.seconds) / total}%`, "--of": colour(part.phase)}})), element("span", {class: "dim"}, `${seconds(part.seconds)} (${Math.round((100 * part.seconds) / total)} %)`)]));
    const examples = element("p", {class: "small"}, one.examples.length ? "For example " : "", one.examples.slice(-3).map((id) => [element("a", {href: linkTo(id), title: id}, `…${id.slice(-10)}`), " "]).flat());
    return [head, share, bars, examples];
  }));
}
