// @ts-check
// Parallel coordinates: an axis for each setting that differs and one for an outcome, and a line for each run.

/** @typedef {{column: Column, share: (cell: Cell) => number | undefined, value: (share: number) => number,
 *   ticks: [number, string][]}} Axis places on an axis are shares of its length, 0 at the bottom */
/** @typedef {{runs: Run[], visible: Set<Run>, columns: Column[], filters: Map<string, Filter>,
 *   onFilter: (column: Column, filter: Filter | null) => void, onToggle: (run: Run) => void, isShown: (run: Run) => boolean,
 *   onRead: (text: string) => void}} Comparison */

const AXES = { height: 300, top: 34, bottom: 16, gap: 150, side: 75, grip: 13, drag: 4 };
const MOST_WORDS = 20; // values on an axis of words
const MOST_AXES = 12;
const MOST_TICKS = 12; // values that are named one by one
const LOGARITHMIC = 20; // greatest by least value from which on an axis is logarithmic

/** Returns the axis of a column; null if the runs have too many words in it. @param {Run[]} runs @param {Column} column @returns {Axis | null} */
function axisOf(runs, column) {
  const cells = runs.flatMap((run) => cellOf(run, column) ?? []);
  if (column.kind === "setting" && cells.some((cell) => cell.number === null)) {
    const words = valueCounts(runs, column).map(([text]) => text);
    const place = (/** @type {number} */ n) => words.length > 1 ? n / (words.length - 1) : 0.5;
    return words.length > MOST_WORDS ? null
      : { column, share: (cell) => place(words.indexOf(cell.text)), value: Number, ticks: words.map((word, n) => [place(n), word]) };
  }
  const numbers = [...new Set(cells.flatMap((cell) => cell.number ?? []))].sort((a, b) => a - b);
  if (!numbers.length) return null;
  const [low, high] = [numbers[0], numbers[numbers.length - 1]];
  const isLogarithmic = low > 0 && high / low >= LOGARITHMIC;
  const scale = isLogarithmic ? Math.log : Number, back = isLogarithmic ? Math.exp : Number;
  const share = (/** @type {number} */ value) => low === high ? 0.5 : (scale(value) - scale(low)) / (scale(high) - scale(low));
  const isNamed = column.kind === "setting" && numbers.length <= MOST_TICKS;
  const texts = new Map(cells.map((cell) => [cell.number, cell.text]));
  const round = isLogarithmic || low === high ? [low, Number(back((scale(low) + scale(high)) / 2).toPrecision(2)), high] : ticksOf(low, high);
  return {
    column,
    share: ({ number }) => number === null ? undefined : share(number),
    value: (at) => at <= 0 ? low : at >= 1 ? high : back(scale(low) + at * (scale(high) - scale(low))),
    ticks: isNamed ? numbers.map((number) => [share(number), texts.get(number) ?? numberText(number)])
      : [...new Set(round)].map((number) => [share(number), numberText(number)]),
  };
}

/** Returns what a run has on each axis, in words. @param {Run} run @param {Axis[]} axes */
function runText(run, axes) {
  return [`run ${run.number}, ${run.name}`, ...axes.map(({ column }) => `${column.label} ${cellOf(run, column)?.text ?? "–"}`)].join(", ");
}

/** Draws the axes and the lines of all runs; those that are filtered out are faint. Returns null where nothing differs.
 * @param {Comparison} comparison */
function drawAxes({ runs, visible, columns, filters, onFilter, onToggle, isShown, onRead }) {
  const all = columns.flatMap((column) => axisOf(runs, column) ?? []);
  const axes = all.length > MOST_AXES ? [...all.slice(0, MOST_AXES - 1), all[all.length - 1]] : all;
  if (axes.length < 2) return null;
  const width = Math.max(560, 2 * AXES.side + (axes.length - 1) * AXES.gap), length = AXES.height - AXES.top - AXES.bottom;
  const x = (/** @type {number} */ n) => AXES.side + n * (width - 2 * AXES.side) / (axes.length - 1);
  const y = (/** @type {number} */ share) => AXES.height - AXES.bottom - share * length;
  const svg = svgElement("svg", { viewBox: `0 0 ${width} ${AXES.height}`, role: "group", "aria-label": "parallel coordinates of the runs" });
  svg.style.minWidth = `${width * 0.72}px`;
  svg.style.maxWidth = `${width * 1.3}px`;
  const outcome = axes[axes.length - 1];
  for (const run of [...runs.filter((each) => !visible.has(each)), ...runs.filter((each) => visible.has(each))]) {
    svg.append(lineOf(run, { axes, x, y, outcome, isVisible: visible.has(run), isShown: isShown(run), onToggle, onRead }));
  }
  for (const [n, axis] of axes.entries()) svg.append(axisElement(svg, axis, x(n), y, { filters, runs, onFilter }));
  return svg;
}

/** @param {Run} run @param {{axes: Axis[], x: (n: number) => number, y: (share: number) => number, outcome: Axis, isVisible: boolean,
 *   isShown: boolean, onToggle: (run: Run) => void, onRead: (text: string) => void}} view */
function lineOf(run, { axes, x, y, outcome, isVisible, isShown, onToggle, onRead }) {
  const text = runText(run, axes);
  const group = svgElement("g", { class: isVisible ? isShown ? "line shown" : "line" : "line dimmed" });
  const points = axes.flatMap((axis, n) => {
    const cell = cellOf(run, axis.column), share = cell && axis.share(cell);
    return share === undefined ? [] : [`${x(n).toFixed(1)},${y(share).toFixed(1)}`];
  }).join(" ");
  const end = cellOf(run, outcome.column), share = end && outcome.share(end);
  const line = svgElement("polyline", { points });
  if (share !== undefined) line.style.stroke = `color-mix(in oklab, var(--mark) ${Math.round(100 * share)}%, var(--bar))`;
  group.append(line);
  if (!isVisible) return group;
  group.append(svgElement("polyline", { points, class: "grip" }));
  for (const [name, value] of Object.entries({ role: "button", tabindex: "-1", "aria-label": text, "aria-pressed": String(isShown),
    "data-run": run.name })) group.setAttribute(name, value);
  for (const event of ["pointerenter", "focus"]) group.addEventListener(event, () => onRead(text));
  group.addEventListener("click", () => onToggle(run));
  group.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    onToggle(run);
  });
  return group;
}

/** @param {Element} svg @param {Axis} axis @param {number} x @param {(share: number) => number} y
 * @param {{filters: Map<string, Filter>, runs: Run[], onFilter: (column: Column, filter: Filter | null) => void}} filtering */
function axisElement(svg, axis, x, y, { filters, runs, onFilter }) {
  const group = svgElement("g", { class: "axis" }), [bottom, top] = [y(0), y(1)];
  group.append(svgElement("line", { x1: x, x2: x, y1: bottom, y2: top }),
    svgElement("text", { x, y: top - 16, "text-anchor": "middle", class: "title" }, axis.column.label));
  for (const [share, text] of axis.ticks) {
    const short = text.length > 18 ? `${text.slice(0, 17)}…` : text;
    group.append(svgElement("line", { x1: x - 4, x2: x, y1: y(share), y2: y(share) }),
      svgElement("text", { x: x - 7, y: y(share) + 4, "text-anchor": "end" }, short));
  }
  const range = rangeOfFilter(axis, filters.get(axis.column.key), runs);
  const brush = svgElement("rect", { x: x - 6, width: 12, class: "brush" });
  const setBrush = (/** @type {number} */ low, /** @type {number} */ high) => {
    brush.setAttribute("y", String(y(high)));
    brush.setAttribute("height", String(Math.max(2, y(low) - y(high))));
  };
  if (range) setBrush(...range);
  const grip = svgElement("rect", { x: x - AXES.grip, width: 2 * AXES.grip, y: top - 8, height: bottom - top + 16, class: "grip" });
  group.append(brush, grip);
  const shareAt = (/** @type {PointerEvent} */ event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(/** @type {SVGSVGElement} */ (svg).getScreenCTM()?.inverse());
    return Math.min(1, Math.max(0, (bottom - point.y) / (bottom - top)));
  };
  grip.addEventListener("pointerdown", (down) => {
    down.preventDefault();
    grip.setPointerCapture(down.pointerId);
    const from = shareAt(down);
    const move = (/** @type {PointerEvent} */ event) => setBrush(Math.min(from, shareAt(event)), Math.max(from, shareAt(event)));
    grip.addEventListener("pointermove", move);
    grip.addEventListener("pointerup", (up) => {
      const ends = /** @type {[number, number]} */ ([Math.min(from, shareAt(up)), Math.max(from, shareAt(up))]);
      onFilter(axis.column, Math.abs(up.clientY - down.clientY) < AXES.drag ? null : filterOf(axis, runs, ends));
    }, { once: true });
  });
  return group;
}

/** Returns the filter of a part of an axis: of a setting its values there. @param {Axis} axis @param {Run[]} runs
 * @param {[number, number]} ends @returns {Filter} */
function filterOf(axis, runs, [low, high]) {
  if (axis.column.kind !== "setting") return { low: axis.value(low), high: axis.value(high) };
  const cells = runs.flatMap((run) => cellOf(run, axis.column) ?? []);
  return { values: new Set(cells.filter((cell) => {
    const share = axis.share(cell);
    return share !== undefined && low <= share && share <= high;
  }).map((cell) => cell.text)) };
}

/** Returns the part of an axis that a filter keeps. @param {Axis} axis @param {Filter | undefined} filter @param {Run[]} runs
 * @returns {[number, number] | undefined} */
function rangeOfFilter(axis, filter, runs) {
  if (!filter) return undefined;
  const cells = "values" in filter ? runs.flatMap((run) => cellOf(run, axis.column) ?? []).filter((cell) => filter.values.has(cell.text))
    : [filter.low, filter.high].map((number) => ({ text: "", number }));
  const shares = cells.flatMap((cell) => axis.share(cell) ?? []).map((share) => Math.min(1, Math.max(0, share)));
  return shares.length ? [Math.min(...shares), Math.max(...shares)] : undefined;
}
