// @ts-check
// The document: one selection that all views show, with its details, and a search.
// The address holds the selection: `#rank=3`, `#stage=1`, `#layer=blocks.0`; a layer also by its number.

const MOST_DRIFT = 4; // pixels between press and release of a click

/** @param {string} id */
function dataOf(id) {
  return JSON.parse(document.getElementById(id)?.textContent ?? "null");
}

/** @typedef {{plan: Plan, timeline: Timeline, curves: Curve[] | null, name: string}} Side */
/** @type {Side[]} */
const sides = ["", "-2"].filter((suffix) => document.getElementById(`plan${suffix}`)).map((suffix, n) => (
  { plan: dataOf(`plan${suffix}`), timeline: dataOf(`timeline${suffix}`), curves: dataOf(`curves${suffix}`),
    name: document.querySelector(`[data-side="${n}"] h3`)?.textContent ?? "" }));
/** @type {[string, Subject][]} */
const everything = [...new Map(sides.flatMap((side) => searchable(side.plan)))];
for (const entry of everything) lowerNames.set(entry, entry[0].toLowerCase());

/** @param {Element} element @returns {Subject} */
function subjectOf(element) {
  const box = /** @type {SVGElement} */ (element);
  return Object.fromEntries(NUMBERED.filter((kind) => box.dataset[kind] !== undefined)
    .map((kind) => [kind, Number(box.dataset[kind])]));
}

/** The boxes of each side, with what they stand for. */
const boxes = sides.map((_, n) => [...document.querySelectorAll(`[data-side="${n}"] g[data-pipeline]`)]
  .map((box) => ({ box, subject: subjectOf(box) })));

/** @returns {Subject} */
function fromAddress() {
  const pairs = new URLSearchParams(location.hash.slice(1)), layer = pairs.get("layer");
  const numbers = NUMBERED.filter((kind) => /^\d+$/.test(pairs.get(kind) ?? "")).map((kind) => [kind, Number(pairs.get(kind))]);
  if (layer === null) return Object.fromEntries(numbers);
  const isName = sides.some((side) => layerOf(side.plan, { layer }) >= 0);
  return { ...Object.fromEntries(numbers), layer: isName ? layer : sides[0].plan.layers[Number(layer)]?.name ?? layer };
}

/** Selects by the address, so that a link and the back button lead to the same. @param {Subject} chosen */
function select(chosen) {
  location.hash = new URLSearchParams(Object.entries(chosen).map(([kind, value]) => [kind, String(value)])).toString();
  show();
}

function show() {
  const selection = fromAddress(), any = Object.keys(selection).length > 0;
  document.body.classList.toggle("selecting", any);
  const aside = /** @type {HTMLElement} */ (document.getElementById("details"));
  aside.replaceChildren();
  for (const [n, side] of sides.entries()) {
    const chosen = completed(side.plan, selection);
    for (const { box, subject } of boxes[n]) {
      const isChosen = any && matches(subject, chosen);
      box.classList.toggle("chosen", isChosen);
      if (box.role) box.ariaPressed = String(isChosen);
    }
    if (any) aside.append(sideElement(side, details(side.plan, chosen)));
  }
  if (!any) aside.textContent = "Select a rank, a stage, an action or an exchange in any view, or search for a layer.";
}

/** @param {Side} side @param {Section[]} sections */
function sideElement(side, sections) {
  const element = document.createElement("div"), name = document.createElement("p");
  name.className = "name";
  name.textContent = sections.length ? side.name : `${side.name || "the plan"} has none`;
  element.append(...(name.textContent ? [name] : []), ...sections.flatMap(sectionElements));
  return element;
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

/** Moves the cursors of the other sides to the same time; where one has no seconds, to the same share of the step.
 * @param {number} from @param {number} time */
function moveOthers(from, time) {
  const { timed, total } = sides[from].timeline;
  for (const [n, { timeline }] of sides.entries()) {
    if (n !== from) cursors[n]?.(timed && timeline.timed ? time : time / total * timeline.total);
  }
}

/** @type {((time: number) => void)[]} */
const cursors = [];
for (const canvas of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll(".canvas"))) {
  makeMovable(canvas);
  makeReachable(canvas);
  const side = /** @type {HTMLElement} */ (canvas.closest(".side")), n = Number(side.dataset.side);
  const place = /** @type {HTMLElement | null} */ (side.querySelector(".moment"));
  if (place) cursors[n] = makeCursor(canvas, place, sides[n].timeline, (time) => moveOthers(n, time));
}
const run = document.querySelector("section.run");
if (run) addCurves(run, sides.map((side) => side.curves ?? []));
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
