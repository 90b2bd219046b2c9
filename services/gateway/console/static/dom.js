// Elements, without strings of HTML: what comes from the cluster is text and stays text.

/** An element: element("td", {class: "name", title: "x"}, "text", child). Names that begin with "on" are listeners. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, of] of Object.entries(value)) made.style.setProperty(key, of);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

/** An operator's small button. */
export const action = (text, label, onclick, disabled = false) =>
  element("button", {class: "tiny", type: "button", "aria-label": label, title: label, onclick, disabled}, text);

export const byId = (id) => document.getElementById(id);

/** Keeps the children of `container` as `items` are, in order, without touching those that stay: focus and hover survive. */
export function keyed(container, items, keyOf, create, update) {
  const known = new Map([...container.children].map((child) => [child.dataset.key, child]));
  let before = container.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = known.get(key);
    if (child) known.delete(key);
    else { child = create(item); child.dataset.key = key; }
    if (child === before) before = before.nextElementSibling;
    else container.insertBefore(child, before);
    update(child, item);
  }
  for (const child of known.values()) child.remove();
}

/** A table whose rows are kept as `keyed` does. `columns`: [header, cell of an item (text or nodes), attributes]. */
export function table(container, caption, columns, items, keyOf) {
  let made = container.querySelector("table");
  if (!made) {
    made = element("table", {}, element("caption", {}, caption),
      element("thead", {}, element("tr", {}, columns.map(([header, , attributes]) => element("th", {scope: "col", class: attributes?.class}, header)))), element("tbody"));
    container.replaceChildren(made);
  }
  keyed(made.tBodies[0], items, keyOf, () => element("tr", {}, columns.map(([, , attributes]) => element("td", attributes ?? {}))), (row, item) => {
    columns.forEach(([, cell], index) => put(row.cells[index], cell(item)));
  });
}

/** Sets what an element holds, if that is another: text, a node, or {key, make} for what is made again only for another key. */
export function put(target, content) {
  if (content !== null && typeof content === "object" && "make" in content) {
    if (target.dataset.made !== content.key) { target.dataset.made = content.key; target.replaceChildren(...[content.make()].flat()); }
  } else if (content instanceof Node || Array.isArray(content)) target.replaceChildren(...[content].flat());
  else if (target.textContent !== String(content)) target.textContent = content;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.9995) return `${Number((1000 * value).toPrecision(3))} ms`;
  if (value < 120) return `${value.toPrecision(3)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${(value / 3600).toFixed(1)} h` : `${Math.round(value / 86400)} days`;
}

/** Wall-clock time of this browser, of a Unix time. */
export const clock = (unixS) => new Date(1000 * unixS).toLocaleTimeString([], {hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false});

export const percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(share > 0.9995 ? 0 : 1)} %`);

const numbers = new Map();
/** Each model keeps its colour: a custom property of CSS. */
export function colourOf(model) {
  if (!numbers.has(model)) numbers.set(model, 1 + (numbers.size % 8));
  return `var(--m${numbers.get(model)})`;
}
/** A CSS variable's value, for canvases. */
export const resolved = (variable) => getComputedStyle(document.documentElement).getPropertyValue(variable.replace(/^var\(|\)$/g, "")).trim();
