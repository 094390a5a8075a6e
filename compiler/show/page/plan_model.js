// @ts-check
// The plan of the page, and what a selection means in it: pure functions, without the document.
// `tsc --checkJs --strict` checks the types of all scripts together; a page holds them one after another.

/** @typedef {{rank?: number, pipeline?: number, stage?: number, exchange?: number, layer?: string}} Subject */
/** @typedef {{operation: string, axis: string, what: string, dtype: string, count: number, bytes: number, ranks: number}} Traffic */
/** @typedef {{pipeline: number, first: number, last: number, stages: number[], flops: number, traffic: Traffic[],
 *   memory: Record<string, number | string>}} RankClass */
/** @typedef {{index: number, pipeline: number, first: number, last: number, parameters: number, flops: number, kept: number,
 *   output_bytes: number}} Stage */
/** @typedef {{name: string, kind: string, parameters: number, flops: number}} Layer */
/** @typedef {{ranks: RankClass[], stages: Stage[], layers: Layer[], axes: {name: string, size: number}[],
 *   topology: {nodes: number, processes: number}}} Plan */
/** @typedef {{title: string, rows: [string, string][]}} Section */

const NUMBERED = /** @type {const} */ (["rank", "pipeline", "stage", "exchange"]);
const MEMORY = ["parameters", "gradients", "optimizer", "activations", "buffers", "communication", "framework"];
const MOST_RESULTS = 12;

/** Returns a number of bytes as text. @param {number} bytes */
function byteText(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = bytes < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(bytes) / 10));
  return `${Number((bytes / 1024 ** power).toPrecision(3))} ${units[power]}`;
}

/** Returns a time as text. @param {number} seconds */
function timeText(seconds) {
  const [size, unit] = /** @type {[number, string][]} */ ([[3600, "h"], [60, "min"], [1, "s"], [1e-3, "ms"]])
    .find(([least]) => seconds >= least) ?? [1e-6, "us"];
  return `${Number((seconds / size).toPrecision(3))} ${unit}`;
}

/** Returns a number and what it counts. @param {number} count @param {string} noun */
function plural(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : /(ch|s)$/.test(noun) ? "es" : "s"}`;
}

/** Names ranks. @param {number} first @param {number} last */
function ranksText(first, last) {
  return first === last ? `rank ${first}` : `ranks ${first} to ${last}`;
}

/** Returns the class of ranks that a rank belongs to. @param {Plan} plan @param {number} rank */
function classOf(plan, rank) {
  return plan.ranks.find((each) => each.first <= rank && rank <= each.last);
}

/** Returns the place of a layer among the plan's, by its name; -1 for none. @param {Plan} plan @param {Subject} chosen */
function layerOf(plan, chosen) {
  return chosen.layer === undefined ? -1 : plan.layers.findIndex((each) => each.name === chosen.layer);
}

/** Adds what a selection implies: the stage of a layer, the pipeline coordinate of a stage or a rank.
 * @param {Plan} plan @param {Subject} chosen @returns {Subject} */
function completed(plan, chosen) {
  const layer = layerOf(plan, chosen);
  const stage = chosen.layer === undefined ? chosen.stage
    : plan.stages.find((each) => each.first <= layer && layer <= each.last)?.index;
  const pipeline = stage !== undefined ? plan.stages.find((each) => each.index === stage)?.pipeline
    : chosen.rank !== undefined ? classOf(plan, chosen.rank)?.pipeline : chosen.pipeline;
  return { ...chosen, stage, pipeline };
}

/** True if a box stands for the selection or a part of it: what both name is equal.
 * @param {Subject} box @param {Subject} chosen */
function matches(box, chosen) {
  const shared = NUMBERED.filter((kind) => box[kind] !== undefined && chosen[kind] !== undefined);
  return shared.length > 0 && shared.every((kind) => box[kind] === chosen[kind]);
}

/** Returns everything that can be searched for, with its name. @param {Plan} plan @returns {[string, Subject][]} */
function searchable(plan) {
  const count = plan.topology.nodes * plan.topology.processes;
  return [
    ...plan.stages.map((stage) => /** @type {[string, Subject]} */ ([`stage ${stage.index}`, { stage: stage.index }])),
    ...plan.layers.map((layer) => /** @type {[string, Subject]} */ ([`${layer.name} (${layer.kind})`, { layer: layer.name }])),
    ...Array.from({ length: count }, (_, n) => /** @type {[string, Subject]} */ ([`rank ${n}`, { rank: n }])),
  ];
}

/** The names in lower case, made once: a plan has as many as ranks. @type {WeakMap<[string, Subject], string>} */
const lowerNames = new WeakMap();

/** Returns the names that a text finds: equal ones first, then those that begin with it, then the rest.
 * @param {[string, Subject][]} all @param {string} text */
function search(all, text) {
  const words = text.trim().toLowerCase();
  const grade = (/** @type {string} */ name) =>
    name === words || name.startsWith(`${words} (`) ? 0 : name.startsWith(words) ? 1 : name.includes(words) ? 2 : 3;
  if (!words) return [];
  const graded = all.map((entry) => ({ entry, grade: grade(lowerNames.get(entry) ?? entry[0].toLowerCase()) })).filter((each) => each.grade < 3);
  return graded.sort((a, b) => a.grade - b.grade).slice(0, MOST_RESULTS).map((each) => each.entry);
}

/** Returns what a selection holds, sends and waits for. @param {Plan} plan @param {Subject} given @returns {Section[]} */
function details(plan, given) {
  const chosen = completed(plan, given);
  /** @type {Section[]} */
  const sections = [];
  const layer = plan.layers[layerOf(plan, chosen)];
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
  const name = ranksText(ranks.first, ranks.last);
  const title = chosen.rank === undefined || ranks.first === ranks.last ? name : `rank ${chosen.rank}, one of ${name}`;
  /** @type {[string, string][]} */
  const memory = MEMORY.filter((kind) => Number(ranks.memory[kind]) > 0)
    .map((kind) => [kind, byteText(Number(ranks.memory[kind]))]);
  const peak = memory.length ? MEMORY.reduce((sum, kind) => sum + Number(ranks.memory[kind] ?? 0), 0) : 0;
  const rows = (/** @type {Traffic[]} */ traffic) => traffic.map((each) => /** @type {[string, string]} */ (
    [`${each.operation.replaceAll("_", " ")}, ${each.axis}`, `${each.what}: ${byteText(each.bytes)}, ${plural(each.count, "time")}`]));
  const sections = [
    { title: `${title} ${ranks.first === ranks.last || chosen.rank !== undefined ? "holds" : "hold"}`,
      rows: [["stages", ranks.stages.join(", ")], ...memory, ["in all", `${byteText(peak)}, at the ${ranks.memory.when}`]] },
    { title: "sends", rows: rows(ranks.traffic.filter((each) => each.operation !== "receive")) },
    { title: "waits for", rows: rows(ranks.traffic.filter((each) => each.operation !== "send")) },
  ];
  return /** @type {Section[]} */ (sections.filter((section) => section.rows.length > 0));
}
