// @ts-check
// The runs of the page, what differs between them, and filters by that: pure functions, without the document.

/** @typedef {[string, number | null]} SettingText a setting as the job has it, and as a number */
/** @typedef {{name: string, number: number, state: string, line: string, step: number, steps: number, updated: number,
 *   bytes: number, settings: Record<string, SettingText> | null, last: Record<string, number | null>,
 *   best: Record<string, [number, number]>, seconds: number | null}} Run `bytes` are those of its records */
/** @typedef {{revision: number, complete: boolean, differing: string[], names: string[] | null, runs: Run[]}} Changes */
/** @typedef {{cursor: string, anew: boolean, more: boolean, curves: Curve[]}} NewCurves */
/** @typedef {{key: string, kind: "state" | "setting" | "last" | "best", name: string, label: string}} Column */
/** @typedef {{values: Set<string>} | {low: number, high: number}} Filter the texts that are kept, or a range */
/** @typedef {{text: string, number: number | null}} Cell */

const MOST_KEPT = 2000; // points of a curve; more are thinned to half
const STATE = /** @type {Column} */ ({ key: "state", kind: "state", name: "state", label: "state" });
const NO_VALUE = "none";

/** Returns the last words of each path, as many as tell them apart. @param {string[]} paths */
function shortNames(paths) {
  const tail = (/** @type {string} */ path, /** @type {number} */ count) => path.split(".").slice(-count).join(".");
  return paths.map((path) => {
    let count = 1;
    while (count < 9 && paths.some((other) => other !== path && tail(other, count) === tail(path, count))) count++;
    return tail(path, count);
  });
}

/** Returns the columns of what differs in the jobs. @param {string[]} differing @returns {Column[]} */
function settingColumns(differing) {
  const names = shortNames(differing);
  return differing.map((name, n) => ({ key: `setting ${name}`, kind: "setting", name, label: names[n] }));
}

/** Returns the columns of metrics: the last values of all, and the best of those that have one.
 * @param {Run[]} runs @returns {Column[]} */
function outcomeColumns(runs) {
  const names = (/** @type {"last" | "best"} */ kind) => [...new Set(runs.flatMap((run) => Object.keys(run[kind])))];
  return [
    ...names("last").map((name) => /** @type {Column} */ ({ key: `last ${name}`, kind: "last", name, label: name })),
    ...names("best").map((name) => /** @type {Column} */ ({ key: `best ${name}`, kind: "best", name, label: `best ${name}` })),
  ];
}

/** Returns what a run has in a column; undefined for nothing yet. @param {Run} run @param {Column} column @returns {Cell | undefined} */
function cellOf(run, { kind, name }) {
  if (kind === "state") return { text: run.state, number: null };
  if (kind === "setting") return run.settings ? { text: run.settings[name]?.[0] ?? NO_VALUE, number: run.settings[name]?.[1] ?? null } : undefined;
  if (kind === "best") return run.best[name] && { text: `${numberText(run.best[name][0])} at ${run.best[name][1]}`, number: run.best[name][0] };
  return run.last[name] === undefined ? undefined : { text: numberText(run.last[name]), number: run.last[name] };
}

/** True if a run passes a filter. @param {Run} run @param {Column} column @param {Filter} filter */
function passes(run, column, filter) {
  const cell = cellOf(run, column);
  if ("values" in filter) return filter.values.has(cell?.text ?? "");
  return typeof cell?.number === "number" && filter.low <= cell.number && cell.number <= filter.high;
}

/** Returns runs in the order of a column, those without a value at the end. @param {Run[]} runs
 * @param {Column | null} column @param {boolean} isDescending */
function sorted(runs, column, isDescending) {
  if (!column) return isDescending ? runs.toReversed() : runs;
  const before = (/** @type {Cell} */ a, /** @type {Cell} */ b) =>
    a.number !== null && b.number !== null ? a.number - b.number : a.text.localeCompare(b.text, "en", { numeric: true });
  return runs.toSorted((one, other) => {
    const a = cellOf(one, column), b = cellOf(other, column);
    if (!a || !b) return Number(!a) - Number(!b);
    return isDescending ? before(b, a) : before(a, b);
  });
}

/** Returns the values of a column with the number of runs that have each, in order.
 * @param {Run[]} runs @param {Column} column @returns {[string, number][]} */
function valueCounts(runs, column) {
  /** @type {Map<string, number>} */
  const counts = new Map();
  for (const run of sorted(runs, column, false)) {
    const text = cellOf(run, column)?.text;
    if (text !== undefined) counts.set(text, (counts.get(text) ?? 0) + 1);
  }
  return [...counts];
}

/** Returns at most half of MOST_KEPT points: of each part the least and the greatest, so that spikes stay.
 * @param {Point[]} points @returns {Point[]} */
function thinned(points) {
  const parts = MOST_KEPT / 4 - 1, kept = new Set([0, points.length - 1]);
  for (let part = 0; part < parts; part++) {
    let least = -1, greatest = -1;
    for (let n = Math.floor(part * points.length / parts); n < Math.floor((part + 1) * points.length / parts); n++) {
      const value = points[n][1];
      if (value === null) continue;
      if (least < 0 || value < Number(points[least][1])) least = n;
      if (greatest < 0 || value > Number(points[greatest][1])) greatest = n;
    }
    for (const n of [least, greatest]) if (n >= 0) kept.add(n);
  }
  return [...kept].sort((a, b) => a - b).map((n) => points[n]);
}

/** Returns curves with the points that follow. Phases lose every second step instead of being thinned, all the same ones,
 * because a chart stacks them. @param {Curve[]} curves @param {NewCurves} next @returns {Curve[]} */
function extended(curves, next) {
  const known = next.anew ? [] : curves;
  const merged = [...known, ...next.curves.filter(({ metric, split }) => !known.some((each) => each.metric === metric && each.split === split))
    .map((curve) => ({ ...curve, points: /** @type {Point[]} */ ([]) }))];
  return merged.map((curve) => {
    const added = next.curves.find(({ metric, split }) => metric === curve.metric && split === curve.split)?.points ?? [];
    const points = [...curve.points, ...added];
    if (points.length <= MOST_KEPT) return { ...curve, points };
    return { ...curve, points: curve.metric.startsWith(PHASE) ? points.filter((_, n) => (points.length - 1 - n) % 2 === 0) : thinned(points) };
  });
}

/** Returns a chart for each metric of each split, with a line for each run. @param {[Run, Curve[]][]} runs @returns {Chart[]} */
function metricCharts(runs) {
  /** @type {Map<string, Chart>} */
  const charts = new Map();
  for (const [run, curves] of runs) {
    for (const { metric, split, points } of curves) {
      if (metric.startsWith(PHASE)) continue;
      const title = `${split} ${metric}`;
      const chart = charts.get(title) ?? { title, lines: [], stacked: false };
      charts.set(title, chart);
      chart.lines.push({ ...lineStyle(run), name: `run ${run.number}`, title: run.name, points });
    }
  }
  return [...charts.values()];
}

/** Returns the phases of a step of each run, as the page of one run shows them. @param {[Run, Curve[]][]} runs @returns {Chart[]} */
function phaseCharts(runs) {
  return runs.flatMap(([run, curves]) => chartsOf([curves.filter((curve) => curve.metric.startsWith(PHASE))])
    .map((chart) => ({ ...chart, title: `run ${run.number}: ${chart.title}` })));
}

/** Returns the colour and the dashes of a run, by its number. @param {Run} run */
function lineStyle({ number }) {
  return { colour: (number - 1) % COLOURS.length, side: Math.floor((number - 1) / COLOURS.length) };
}
