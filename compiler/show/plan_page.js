// @ts-check
// The page of a plan: one selection that all views show, its details, a search, pan and zoom. No library.
// `tsc --checkJs --strict` checks the types. The address holds the selection: `#rank=3`, `#stage=1`, `#layer=4`.

/** @typedef {{rank?: number, pipeline?: number, stage?: number, layer?: number, exchange?: number}} Subject */
/** @typedef {{operation: string, axis: string, what: string, dtype: string, count: number, bytes: number, ranks: number}} Traffic */
/** @typedef {{pipeline: number, first: number, last: number, stages: number[], flops: number, traffic: Traffic[],
 *   memory: Record<string, number | string>}} RankClass */
/** @typedef {{index: number, pipeline: number, first: number, last: number, parameters: number, flops: number, kept: number,
 *   output_bytes: number}} Stage */
/** @typedef {{name: string, kind: string, parameters: number, flops: number}} Layer */
/** @typedef {{ranks: RankClass[], stages: Stage[], layers: Layer[], axes: {name: string, size: number}[],
 *   topology: {nodes: number, processes: number}}} Plan */
/** @typedef {{title: string, rows: [string, string][]}} Section */

const KINDS = /** @type {const} */ (["rank", "pipeline", "stage", "layer", "exchange"]);
const MEMORY = ["parameters", "gradients", "optimizer", "activations", "buffers", "communication", "framework"];
const MOST_RESULTS = 12;
const MOST_DRIFT = 4; // pixels between press and release of a click

/** Returns a number of bytes as text. @param {number} bytes */
function byteText(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = bytes < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(bytes) / 10));
  return `${Number((bytes / 1024 ** power).toPrecision(3))} ${units[power]}`;
}

/** Returns the class of ranks that a rank belongs to. @param {Plan} plan @param {number} rank */
function classOf(plan, rank) {
  return plan.ranks.find((each) => each.first <= rank && rank <= each.last);
}

/** Adds what a selection implies: the stage of a layer, the pipeline coordinate of a stage or a rank.
 * @param {Plan} plan @param {Subject} chosen @returns {Subject} */
function completed(plan, chosen) {
  const layer = chosen.layer;
  const stage = layer === undefined ? chosen.stage
    : plan.stages.find((each) => each.first <= layer && layer <= each.last)?.index;
  const pipeline = stage !== undefined ? plan.stages.find((each) => each.index === stage)?.pipeline
    : chosen.rank !== undefined ? classOf(plan, chosen.rank)?.pipeline : chosen.pipeline;
  return { ...chosen, stage, pipeline };
}

/** True if a box stands for the selection or a part of it: what both name is equal.
 * @param {Subject} box @param {Subject} chosen */
function matches(box, chosen) {
  const shared = KINDS.filter((kind) => box[kind] !== undefined && chosen[kind] !== undefined);
  return shared.length > 0 && shared.every((kind) => box[kind] === chosen[kind]);
}

/** Returns everything that can be searched for, with its name. @param {Plan} plan @returns {[string, Subject][]} */
function searchable(plan) {
  const count = plan.topology.nodes * plan.topology.processes;
  return [
    ...plan.stages.map((stage) => /** @type {[string, Subject]} */ ([`stage ${stage.index}`, { stage: stage.index }])),
    ...plan.layers.map((layer, n) => /** @type {[string, Subject]} */ ([`${layer.name} (${layer.kind})`, { layer: n }])),
    ...Array.from({ length: count }, (_, n) => /** @type {[string, Subject]} */ ([`rank ${n}`, { rank: n }])),
  ];
}

/** Returns the names that a text finds: equal ones first, then those that begin with it, then the rest.
 * @param {[string, Subject][]} all @param {string} text */
function search(all, text) {
  const words = text.trim().toLowerCase();
  const grade = (/** @type {string} */ name) =>
    name === words || name.startsWith(`${words} (`) ? 0 : name.startsWith(words) ? 1 : name.includes(words) ? 2 : 3;
  const graded = all.map((entry) => ({ entry, grade: grade(entry[0].toLowerCase()) })).filter((each) => each.grade < 3);
  return words ? graded.sort((a, b) => a.grade - b.grade).slice(0, MOST_RESULTS).map((each) => each.entry) : [];
}

/** Returns what a selection holds, sends and waits for. @param {Plan} plan @param {Subject} given @returns {Section[]} */
function details(plan, given) {
  const chosen = completed(plan, given);
  /** @type {Section[]} */
  const sections = [];
  const layer = chosen.layer === undefined ? undefined : plan.layers[chosen.layer];
  if (layer) sections.push({ title: layer.name, rows: [["kind", layer.kind], ...workRows(layer)] });
  const stage = plan.stages.find((each) => each.index === chosen.stage);
  if (stage) sections.push(stageSection(plan, stage));
  const ranks = chosen.rank !== undefined ? classOf(plan, chosen.rank)
    : plan.ranks.find((each) => each.pipeline === chosen.pipeline);
  if (ranks) sections.push(...rankSections(ranks, chosen));
  return sections;
}

/** @param {{parameters: number, flops: number}} part @returns {[string, string][]} */
function workRows(part) {
  return [["parameters", part.parameters.toLocaleString("en")], ["FLOPs", part.flops.toExponential(2)]];
}

/** @param {Plan} plan @param {Stage} stage @returns {Section} */
function stageSection(plan, stage) {
  const names = [stage.first, stage.last].map((n) => plan.layers[n]?.name ?? "?");
  const last = plan.stages.length - 1;
  /** @type {[string, string][]} */
  const rows = [["layers", names.join(" to ")], ...workRows(stage), ["keeps of a micro-batch", byteText(stage.kept)]];
  if (stage.index > 0) rows.push(["forward waits for", `stage ${stage.index - 1}`]);
  if (stage.index < last) rows.push(["backward waits for", `stage ${stage.index + 1}`], ["sends on", byteText(stage.output_bytes)]);
  return { title: `stage ${stage.index}`, rows };
}

/** @param {RankClass} ranks @param {Subject} chosen @returns {Section[]} */
function rankSections(ranks, chosen) {
  const name = ranks.first === ranks.last ? `rank ${ranks.first}` : `ranks ${ranks.first} to ${ranks.last}`;
  const title = chosen.rank === undefined ? name : `rank ${chosen.rank}, one of ${name}`;
  /** @type {[string, string][]} */
  const memory = MEMORY.filter((kind) => Number(ranks.memory[kind]) > 0)
    .map((kind) => [kind, byteText(Number(ranks.memory[kind]))]);
  const peak = memory.length ? MEMORY.reduce((sum, kind) => sum + Number(ranks.memory[kind] ?? 0), 0) : 0;
  const rows = (/** @type {Traffic[]} */ traffic) => traffic.map((each) => /** @type {[string, string]} */ (
    [`${each.operation.replaceAll("_", " ")}, ${each.axis}`, `${each.what}: ${byteText(each.bytes)}, ${each.count} times`]));
  const waits = ranks.traffic.filter((each) => each.operation !== "send");
  return [
    { title: `${title} ${ranks.first === ranks.last || chosen.rank !== undefined ? "holds" : "hold"}`,
      rows: [["stages", ranks.stages.join(", ")], ...memory, ["in all", `${byteText(peak)}, at the ${ranks.memory.when}`]] },
    { title: "sends", rows: rows(ranks.traffic.filter((each) => each.operation !== "receive")) },
    { title: "waits for", rows: rows(waits) },
  ];
}

/** Returns the part of a view that is seen after a zoom around a point, in its own coordinates.
 * @param {[number, number, number, number]} box @param {number} factor @param {number} x @param {number} y
 * @returns {[number, number, number, number]} */
function zoomed([left, top, width, height], factor, x, y) {
  return [x - (x - left) * factor, y - (y - top) * factor, width * factor, height * factor];
}

// ------------------------------------------------------------------------------------------------ the document

/** @param {Element} element @returns {Subject} */
function subjectOf(element) {
  const box = /** @type {SVGElement} */ (element);
  return Object.fromEntries(KINDS.filter((kind) => box.dataset[kind] !== undefined)
    .map((kind) => [kind, Number(box.dataset[kind])]));
}

/** @returns {Subject} */
function fromAddress() {
  const pairs = new URLSearchParams(location.hash.slice(1));
  return Object.fromEntries(KINDS.filter((kind) => /^\d+$/.test(pairs.get(kind) ?? "")).map((kind) => [kind, Number(pairs.get(kind))]));
}

/** Selects by the address, so that a link and the back button lead to the same. @param {Subject} chosen */
function select(chosen) {
  const pairs = KINDS.filter((kind) => chosen[kind] !== undefined).map((kind) => `${kind}=${chosen[kind]}`);
  location.hash = pairs.join("&");
  show();
}

function show() {
  const chosen = completed(plan, fromAddress());
  const any = KINDS.some((kind) => chosen[kind] !== undefined);
  document.body.classList.toggle("selecting", any);
  for (const box of document.querySelectorAll("g[data-pipeline]")) {
    box.classList.toggle("chosen", any && matches(subjectOf(box), chosen));
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
  for (const texts of rows) {
    const row = table.insertRow();
    for (const text of texts) row.insertCell().textContent = text;
  }
  return [heading, table];
}

/** Lets a view be moved and zoomed by pointer, wheel and keys. @param {HTMLElement} canvas */
function makeMovable(canvas) {
  const svg = /** @type {SVGSVGElement} */ (canvas.querySelector("svg"));
  const all = /** @type {[number, number, number, number]} */ ((svg.getAttribute("viewBox") ?? "").split(/[ ,]+/).map(Number));
  let box = all;
  const look = (/** @type {[number, number, number, number]} */ next) => {
    box = next;
    svg.setAttribute("viewBox", box.join(" "));
  };
  const scale = () => Math.max(box[2] / canvas.clientWidth, box[3] / canvas.clientHeight);
  const move = (/** @type {number} */ x, /** @type {number} */ y) => look([box[0] - x * scale(), box[1] - y * scale(), box[2], box[3]]);
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM()?.inverse());
    look(zoomed(box, event.deltaY > 0 ? 1.2 : 1 / 1.2, point.x, point.y));
  }, { passive: false });
  canvas.addEventListener("pointermove", (event) => {
    if (event.buttons === 1) move(event.movementX, event.movementY);
  });
  canvas.addEventListener("keydown", (event) => {
    const steps = /** @type {Record<string, [number, number]>} */ (
      { ArrowLeft: [40, 0], ArrowRight: [-40, 0], ArrowUp: [0, 40], ArrowDown: [0, -40] })[event.key];
    const factor = { "+": 1 / 1.2, "-": 1.2 }[event.key];
    if (steps) move(...steps);
    else if (factor) look(zoomed(box, factor, box[0] + box[2] / 2, box[1] + box[3] / 2));
    else if (event.key === "0") look(all);
    else return;
    event.preventDefault();
  });
}

/** @type {Plan} */
const plan = JSON.parse(document.getElementById("plan")?.textContent ?? "");
const everything = searchable(plan);

for (const canvas of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll(".canvas"))) makeMovable(canvas);
let pressedAt = { x: 0, y: 0 };
document.addEventListener("pointerdown", (event) => { pressedAt = { x: event.clientX, y: event.clientY }; });
document.addEventListener("click", (event) => {
  if (Math.hypot(event.clientX - pressedAt.x, event.clientY - pressedAt.y) > MOST_DRIFT) return; // the view was moved
  const box = event.target instanceof Element ? event.target.closest("g[data-pipeline]") : null;
  if (box) select(subjectOf(box));
});
document.addEventListener("keydown", (event) => {
  const box = event.target instanceof Element ? event.target.closest("g[data-pipeline]") : null;
  if (event.key === "Enter" && box) select(subjectOf(box));
  if (event.key === "Escape") select({});
});
document.getElementById("search")?.addEventListener("input", (event) => {
  const text = /** @type {HTMLInputElement} */ (event.target).value;
  document.getElementById("results")?.replaceChildren(...search(everything, text).map(([name, subject]) => {
    const item = document.createElement("li");
    const button = document.createElement("button");
    button.textContent = name;
    button.addEventListener("click", () => select(subject));
    item.append(button);
    return item;
  }));
});
addEventListener("hashchange", show);
show();
