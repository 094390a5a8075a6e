// @ts-check
// The document: asks the server for what has changed, and shows runs, what differs in their jobs, and their curves.

const PAUSE = 1000; // milliseconds between two questions
const MOST_SHOWN = 8; // runs whose curves are shown at first
const MOST_AT_ONCE = 4; // requests

const token = new URLSearchParams(location.search).get("token") ?? "";
/** @type {Map<string, Run>} */
const runs = new Map();
/** @type {Map<string, {cursor: string, bytes: number, curves: Curve[]}>} */
const records = new Map();
/** @type {Map<string, number>} */
const failed = new Map(); // the bytes of runs whose curves could not be read
/** @type {Set<string>} */
const shownNames = new Set();
/** @type {Map<string, Filter>} */
const filters = new Map();
let revision = 0, isFirst = true, outcomeKey = "", isOutcomeChosen = false, order = { key: "", isDescending: false };
/** @type {string[]} */
let differing = [];

/** @param {string} id */
const part = (id) => /** @type {HTMLElement} */ (document.getElementById(id));
const statusLine = part("status"), outcomes = /** @type {HTMLSelectElement} */ (part("outcome"));
const phases = /** @type {HTMLDetailsElement} */ (part("phases"));
const showTable = makeTable(part("runs")), showFilters = makeFilters(part("filters"));
const showCurves = makeChartGrid(part("curves")), showPhases = makeChartGrid(/** @type {Element} */ (phases.querySelector("div")));

// ----------------------------------------------------------------------------------------------------- the server

/** Returns an answer of the server. @param {string} path @param {Record<string, string>} values */
async function ask(path, values) {
  const response = await fetch(`${path}?${new URLSearchParams({ token, ...values })}`);
  if (!response.ok) throw new Error(String(response.status));
  return response.json();
}

/** Asks for what has changed. Returns whether more is there already. */
async function refresh() {
  const changes = /** @type {Changes} */ (await ask("runs", { after: String(revision) }));
  revision = changes.revision;
  if (changes.names) takeNames(changes.names, changes.runs);
  for (const run of changes.runs) runs.set(run.name, run);
  differing = changes.differing;
  if (isFirst && changes.runs.length) chooseShown();
  if (changes.runs.length || changes.names) show();
  const isMore = await readCurves();
  return isMore || !changes.complete;
}

/** Takes the names of all runs, in order. New ones that train are shown. @param {string[]} names @param {Run[]} changed */
function takeNames(names, changed) {
  const before = new Map([...runs, ...changed.map((run) => /** @type {[string, Run]} */ ([run.name, run]))]);
  if (!isFirst) {
    for (const run of changed) if (!runs.has(run.name) && shownNames.size < MOST_SHOWN) shownNames.add(run.name);
  }
  runs.clear();
  for (const name of names) {
    const run = before.get(name);
    if (run) runs.set(name, run);
  }
  for (const known of [records, failed]) for (const name of known.keys()) if (!runs.has(name)) known.delete(name);
}

/** Shows the curves of the runs that have changed last. */
function chooseShown() {
  isFirst = false;
  const newest = [...runs.values()].sort((a, b) => b.updated - a.updated || a.number - b.number);
  for (const run of newest.slice(0, MOST_SHOWN)) shownNames.add(run.name);
}

/** Reads the new records of the runs that are shown. Returns whether one has more. A run that fails takes no other with it,
 * and is asked for again when it has other bytes. */
async function readCurves() {
  const due = [...shownNames].flatMap((name) => runs.get(name) ?? [])
    .filter((run) => run.bytes !== (records.get(run.name)?.bytes ?? 0) && run.bytes !== failed.get(run.name));
  let isMore = due.length > MOST_AT_ONCE;
  await Promise.allSettled(due.slice(0, MOST_AT_ONCE).map(async (run) => {
    const known = records.get(run.name) ?? { cursor: "", bytes: 0, curves: [] };
    failed.set(run.name, run.bytes);
    const next = /** @type {NewCurves} */ (await ask("curves", { run: String(run.number), cursor: known.cursor }));
    failed.delete(run.name);
    isMore ||= next.more;
    records.set(run.name, { cursor: next.cursor, bytes: next.more ? -1 : run.bytes, curves: extended(known.curves, next) });
  }));
  if (due.length) showCharts();
  return isMore;
}

async function poll() {
  let pause = PAUSE;
  try {
    if (!document.hidden) pause = await refresh() ? 0 : PAUSE;
    document.body.classList.remove("lost");
  } catch (error) {
    const isOld = String(error).includes("403");
    failed.clear(); // it may have been the connection
    document.body.classList.add("lost");
    statusLine.textContent = isOld ? "This address is of an earlier start of dslc ui." : "dslc ui has ended, or cannot be reached.";
    if (isOld) return;
  }
  setTimeout(poll, pause);
}

// ------------------------------------------------------------------------------------------------------- the views

/** @param {Run} run */
function toggle(run) {
  if (!shownNames.delete(run.name)) shownNames.add(run.name);
  failed.delete(run.name);
  show();
  showCharts();
  readCurves();
}

/** @param {Column} column @param {Filter | null} filter */
function setFilter(column, filter) {
  if (filter) filters.set(column.key, filter); else filters.delete(column.key);
  show();
  showCharts();
}

/** Returns the columns of the page. @param {Run[]} all */
function columnsOf(all) {
  const settings = settingColumns(differing), results = outcomeColumns(all);
  return { settings, results, all: [STATE, ...settings, ...results] };
}

/** Returns the runs that pass all filters. @param {Run[]} all @param {Column[]} columns */
function filtered(all, columns) {
  const known = columns.flatMap((column) => {
    const filter = filters.get(column.key);
    return filter ? [{ column, filter }] : [];
  });
  return all.filter((run) => known.every(({ column, filter }) => passes(run, column, filter)));
}

function show() {
  const all = [...runs.values()], columns = columnsOf(all), visible = filtered(all, columns.all);
  const outcome = showOutcomes(columns.results);
  const isShown = (/** @type {Run} */ run) => shownNames.has(run.name);
  showStatus(all, visible);
  showFilters({ runs: all, columns: [STATE, ...columns.settings], outcome, filters, onFilter: setFilter, onClear: () => {
    filters.clear();
    show();
    showCharts();
  } });
  const sortedBy = columns.all.find((column) => column.key === order.key) ?? null;
  showTable({ runs: sorted(visible, sortedBy, order.isDescending), columns: columns.all, order, isShown, onToggle: toggle, onSort: (key) => {
    order = { key, isDescending: order.key === key && !order.isDescending };
    show();
  } });
  showAxes({ runs: all, visible: new Set(visible), columns: outcome ? [...columns.settings, outcome] : [], filters, isShown,
    onFilter: setFilter, onToggle: toggle, onRead: (text) => { part("readout").textContent = text; } });
}

/** @param {Comparison} comparison */
function showAxes(comparison) {
  const place = part("parallel"), focused = document.activeElement?.closest("[data-run]")?.getAttribute("data-run");
  if (place.querySelector(":active")) return; // a part of an axis is being chosen
  const svg = drawAxes(comparison), frame = document.createElement("div");
  part("axes").hidden = svg === null;
  if (!svg) return;
  frame.className = "wide";
  frame.append(svg);
  place.replaceChildren(frame);
  makeReachable(frame);
  for (const line of frame.querySelectorAll("[data-run]")) {
    if (line instanceof SVGElement && line.getAttribute("data-run") === focused) line.focus();
  }
}

/** Shows the metrics of which one is the outcome, and returns it: the best loss as soon as a run has one, until the reader
 * chooses or filters. @param {Column[]} results */
function showOutcomes(results) {
  const keys = results.map((column) => column.key);
  if (!keys.includes(outcomeKey) || !(isOutcomeChosen || filters.has(outcomeKey))) {
    outcomeKey = keys.find((key) => /^best .*loss$/.test(key)) ?? keys.find((key) => key.startsWith("best ")) ?? keys[0] ?? "";
  }
  if (JSON.stringify([...outcomes.options].map((option) => option.value)) !== JSON.stringify(keys)) {
    outcomes.replaceChildren(...results.map((column) => new Option(column.label, column.key)));
  }
  outcomes.value = outcomeKey;
  return results.find((column) => column.key === outcomeKey);
}

/** @param {Run[]} all @param {Run[]} visible */
function showStatus(all, visible) {
  const states = valueCounts(all, STATE).map(([state, count]) => `${count} ${state}`).join(", ");
  const text = `${visible.length < all.length ? `${visible.length} of ` : ""}${plural(all.length, "run")}: ${states}`;
  if (statusLine.textContent !== text) statusLine.textContent = text;
}

function showCharts() {
  const all = [...runs.values()], visible = filtered(all, columnsOf(all).all).filter((run) => shownNames.has(run.name));
  const lines = visible.map((run) => /** @type {[Run, Curve[]]} */ ([run, records.get(run.name)?.curves ?? []]));
  showCurves(metricCharts(lines));
  const charts = phaseCharts(lines);
  phases.hidden = charts.length === 0;
  if (phases.open) showPhases(charts);
}

outcomes.addEventListener("change", () => {
  filters.delete(outcomeKey);
  [outcomeKey, isOutcomeChosen] = [outcomes.value, true];
  show();
});
phases.addEventListener("toggle", showCharts);
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh().catch(() => {}); });
statusLine.textContent = "reading the runs …";
poll();
