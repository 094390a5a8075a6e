// @ts-check
// The document: one selection that all views show, with its details, and a search.
// The address holds the selection: `#rank=3`, `#stage=1`, `#layer=blocks.0`; a layer also by its number.

const MOST_DRIFT = 4; // pixels between press and release of a click

/** @param {string} id */
function dataOf(id) {
  return JSON.parse(document.getElementById(id)?.textContent ?? "null");
}

/** @type {Plan} */
const plan = dataOf("plan");
const everything = searchable(plan);

/** @param {Element} element @returns {Subject} */
function subjectOf(element) {
  const box = /** @type {SVGElement} */ (element);
  return Object.fromEntries(NUMBERED.filter((kind) => box.dataset[kind] !== undefined)
    .map((kind) => [kind, Number(box.dataset[kind])]));
}

/** @returns {Subject} */
function fromAddress() {
  const pairs = new URLSearchParams(location.hash.slice(1)), layer = pairs.get("layer");
  const numbers = NUMBERED.filter((kind) => /^\d+$/.test(pairs.get(kind) ?? "")).map((kind) => [kind, Number(pairs.get(kind))]);
  if (layer === null) return Object.fromEntries(numbers);
  return { ...Object.fromEntries(numbers), layer: layerOf(plan, { layer }) < 0 ? plan.layers[Number(layer)]?.name ?? layer : layer };
}

/** Selects by the address, so that a link and the back button lead to the same. @param {Subject} chosen */
function select(chosen) {
  location.hash = new URLSearchParams(Object.entries(chosen).map(([kind, value]) => [kind, String(value)])).toString();
  show();
}

function show() {
  const chosen = completed(plan, fromAddress());
  const any = Object.values(chosen).some((value) => value !== undefined);
  document.body.classList.toggle("selecting", any);
  for (const box of document.querySelectorAll("g[data-pipeline]")) {
    const isChosen = any && matches(subjectOf(box), chosen);
    box.classList.toggle("chosen", isChosen);
    if (box.role) box.ariaPressed = String(isChosen);
  }
  const aside = /** @type {HTMLElement} */ (document.getElementById("details"));
  aside.replaceChildren(...(any ? details(plan, chosen) : []).flatMap(sectionElements));
  if (!any) aside.textContent = "Select a rank, a stage, an action or an exchange in any view, or search for a layer.";
}

/** @param {Section} section */
function sectionElements({ title, rows }) {
  const heading = document.createElement("h2");
  heading.textContent = title;
  const table = document.createElement("table");
  for (const [name, text] of rows) {
    const row = table.insertRow(), cell = document.createElement("th");
    cell.scope = "row";
    cell.textContent = name;
    row.append(cell);
    row.insertCell().textContent = text;
  }
  return [heading, table];
}

for (const canvas of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll(".canvas"))) {
  makeMovable(canvas);
  makeReachable(canvas);
  const place = /** @type {HTMLElement | null} */ (canvas.parentElement?.querySelector(".moment"));
  if (place) makeCursor(canvas, place, dataOf("timeline"));
}
let pressedAt = { x: 0, y: 0 };
document.addEventListener("pointerdown", (event) => { pressedAt = { x: event.clientX, y: event.clientY }; });
document.addEventListener("click", (event) => {
  if (Math.hypot(event.clientX - pressedAt.x, event.clientY - pressedAt.y) > MOST_DRIFT) return; // the view was moved
  const box = event.target instanceof Element ? event.target.closest("g[data-pipeline]") : null;
  if (box) select(subjectOf(box));
});
document.addEventListener("keydown", (event) => {
  const box = event.target instanceof Element ? event.target.closest("g[data-pipeline]") : null;
  if (box && (event.key === "Enter" || event.key === " ")) {
    event.preventDefault();
    select(subjectOf(box));
  }
  if (event.key === "Escape") select({});
});
document.getElementById("search")?.addEventListener("input", (event) => {
  const text = /** @type {HTMLInputElement} */ (event.target).value;
  document.getElementById("results")?.replaceChildren(...search(everything, text).map(([name, subject]) => {
    const item = document.createElement("li"), button = document.createElement("button");
    button.textContent = name;
    button.addEventListener("click", () => select(subject));
    item.append(button);
    return item;
  }));
});
addEventListener("hashchange", show);
show();
