// The tabs with lists: routes, tenants, and who changed what.

import {byId, clock, element, percent, seconds, table} from "./dom.js";

/** A table in the tab's panel, or the sentence where there is nothing. */
function list(id, empty, caption, columns, items, keyOf) {
  const container = byId(id);
  if (!items.length) { container.replaceChildren(element("p", {class: "dim"}, empty)); return; }
  table(container, caption, columns, items, keyOf);
}

const shares = (weights) => {
  const total = Object.values(weights).reduce((sum, one) => sum + one, 0);
  return Object.entries(weights).map(([model, weight]) => `${model} ${percent(weight / total)}`).join(", ");
};

export function showRoutes(routes) {
  list("routes", "There is no route: tideway route set NAME MODEL=WEIGHT … makes one.", "Routes", [
    ["route", (one) => one.name, {class: "name"}],
    ["models", (one) => shares(one.arms), {class: "text"}],
    ["sticky by", (one) => (one.sticky === "none" ? "–" : one.sticky), {class: "text"}],
    ["mirrored to", (one) => Object.entries(one.mirrors).map(([model, share]) => `${model} ${percent(share)}`).join(", ") || "–", {class: "text roomy"}],
    ["falls back to", (one) => one.fallbacks.join(", ") || "–", {class: "text roomy"}],
    ["down", (one) => ({key: one.down.join(), make: () => element("span", {class: one.down.length ? "bad" : "dim"}, one.down.join(", ") || "–")}), {class: "text"}],
  ], routes, (one) => one.name);
}

const known = (value, text) => (value === null ? "?" : text(value));
const used = (uses) => uses.filter(([, limit]) => limit !== null).map(([use, limit]) => `${use.toLocaleString()}/${limit.toLocaleString()}`).join(", ") || "–";

export function showTenants(tenants) {
  list("tenants", "There is no API key, and nobody asks for anything.", "Tenants, by service in the last minute", [
    ["tenant", (one) => one.tenant || "none", {class: "name"}],
    ["weight", (one) => one.weight, {class: "roomy"}],
    ["service", (one) => known(one.service_s, seconds)],
    ["share", (one) => known(one.share, percent)],
    ["run+wait", (one) => `${known(one.num_running, String)}+${known(one.num_waiting, String)}`],
    ["in flight", (one) => used(one.keys.map((key) => [key.num_online, key.max_in_flight])), {class: "roomy"}],
    ["tokens/min", (one) => used(one.keys.map((key) => [key.num_tokens, key.tokens_per_minute])), {class: "roomy"}],
  ], tenants, (one) => one.tenant);
}

export function showAudit(actions) {
  list("audit", "Nobody has changed anything by the admin API.", "Changes by the admin API, the newest first", [
    ["at", (one) => `${new Date(1000 * one.at_s).toLocaleDateString([], {month: "short", day: "numeric"})} ${clock(one.at_s)}`],
    ["who", (one) => one.who, {class: "text short"}],
    ["action", (one) => ({key: one.action, make: () => [one.action.replace("/admin", ""), element("small", {}, one.body && ` ${one.body.slice(0, 200)}`)]}), {class: "text"}],
    ["from", (one) => one.address, {class: "text short roomy"}],
    ["answer", (one) => ({key: one.status, make: () => element("span", {class: one.status < 400 ? "good" : "bad"}, one.status)})],
  ], actions.slice(0, 100), (one) => `${one.at_s} ${one.gateway_id}`);
}
