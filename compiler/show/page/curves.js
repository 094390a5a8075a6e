// @ts-check
// The curves of runs: a chart for each metric and one of the phases of a step, with a shared cursor over the steps.

/** @typedef {[number, number | null]} Point step, value */
/** @typedef {{metric: string, split: string, points: Point[]}} Curve */
/** @typedef {{name: string, points: Point[], side: number, colour: number, title?: string}} Line `title` is its name in full */
/** @typedef {{title: string, lines: Line[], stacked: boolean}} Chart */

const CHART = { width: 480, height: 190, left: 56, right: 10, top: 8, bottom: 22 };
const PHASE = "seconds.";
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const DASHES = ["", "5 3", "2 2"]; // of the first run and the second; of each six runs
const BORDERS = ["solid", "dashed", "dotted"]; // as keys of these lines
const OUTLIER = 10; // times the median: higher sums of phases, as of a first step, are cut off

/** Returns the charts of the curves of each side. @param {Curve[][]} sides @returns {Chart[]} */
function chartsOf(sides) {
  /** @type {Map<string, Chart>} */
  const charts = new Map();
  for (const [side, curves] of sides.entries()) {
    const letter = sides.length > 1 ? ` ${"AB"[side]}` : "";
    for (const { metric, split, points } of curves) {
      const isPhase = metric.startsWith(PHASE);
      const title = isPhase ? `phases of a step, in ms${letter}` : metric;
      const chart = charts.get(title) ?? { title, lines: [], stacked: isPhase };
      charts.set(title, chart);
      const ofSplit = chart.lines.find((line) => line.name.startsWith(`${split} `));
      const colour = ofSplit?.colour ?? new Set(chart.lines.map((line) => line.colour)).size;
      if (!isPhase) chart.lines.push({ name: `${split}${letter}`, points, side, colour });
      else chart.lines.push({ name: metric.slice(PHASE.length), points: points.map(([step, value]) => [step, 1000 * (value ?? 0)]), side: 0, colour });
    }
  }
  const all = [...charts.values()];
  return [...all.filter((chart) => !chart.stacked), ...all.filter((chart) => chart.stacked)];
}

/** Returns the last of some intervals that begins at or before a time. @template T @param {T[]} all
 * @param {(one: T) => number} start @param {number} time @returns {T | undefined} */
function lastBefore(all, start, time) {
  let low = 0, high = all.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (start(all[middle]) <= time) low = middle + 1; else high = middle;
  }
  return all[low - 1];
}

/** Returns the last value at or before a step; undefined before the first. @param {Line} line @param {number} step */
function valueAt(line, step) {
  return lastBefore(line.points, (point) => point[0], step)?.[1];
}

/** Returns a number in four digits. @param {number | null | undefined} value */
function numberText(value) {
  return value === undefined ? "–" : value === null ? "not finite" : String(Number(value.toPrecision(4)));
}

/** Returns round numbers that part a range in two to five. @param {number} low @param {number} high */
function ticksOf(low, high) {
  const span = high - low || 1, power = 10 ** Math.floor(Math.log10(span));
  const size = [0.2, 0.25, 0.5, 1, 2].map((each) => each * power).find((each) => span / each <= 5) ?? power;
  const first = Math.ceil(low / size - 1e-9);
  return Array.from({ length: Math.floor(high / size + 1e-9) - first + 1 }, (_, n) => Number(((first + n) * size).toPrecision(12)));
}

/** Returns lines of which each is on top of the lines before it. @param {Line[]} lines @returns {Line[]} */
function stackedLines(lines) {
  /** @type {Map<number, number>} */
  const sums = new Map();
  return lines.map((line) => ({ ...line, points: line.points.map(([step, value]) => {
    sums.set(step, (sums.get(step) ?? 0) + (value ?? 0));
    return /** @type {Point} */ ([step, sums.get(step) ?? 0]);
  }) }));
}

/** Returns the least and the greatest value of a chart. Sums of phases begin at 0, and end where they are many times the
 * median. @param {Line[]} lines @param {boolean} stacked @returns {[number, number]} */
function rangeOf(lines, stacked) {
  const of = (/** @type {Line[]} */ some) => some.flatMap((line) => line.points.flatMap(([, value]) => value === null ? [] : [value]))
    .sort((a, b) => a - b);
  const values = of(stacked ? lines.slice(-1) : lines), least = values[0] ?? 0, greatest = values.at(-1) ?? 0;
  if (stacked) {
    const median = values[values.length >> 1] ?? 0;
    return [0, greatest > OUTLIER * median && median > 0 ? 3 * median : greatest || 1];
  }
  return least < greatest ? [least, greatest] : [least - (Math.abs(least) || 1) / 2, least + (Math.abs(least) || 1) / 2];
}

/** @param {string} name @param {Record<string, string | number>} attributes @param {string} [text] */
function svgElement(name, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
  element.textContent = text;
  return element;
}

/** Draws a chart. Returns it, and what brings its cursor to a step and returns its values in words.
 * @param {Chart} chart @param {[number, number]} steps @param {(step: number) => void} onMove */
function drawChart(chart, [first, last], onMove) {
  const { width, height, left, right, top, bottom } = CHART;
  const lines = chart.stacked ? stackedLines(chart.lines) : chart.lines;
  const [low, high] = rangeOf(lines, chart.stacked);
  const x = (/** @type {number} */ step) => left + (step - first) / (last - first || 1) * (width - left - right);
  const y = (/** @type {number} */ value) => height - bottom - (Math.min(high, value) - low) / (high - low) * (height - top - bottom);
  const place = (/** @type {Point} */ [step, value]) => `${x(step).toFixed(1)},${y(value ?? 0).toFixed(1)}`;
  const svg = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": chartText(chart, first, last) });
  for (const tick of ticksOf(low, high)) {
    svg.append(svgElement("line", { x1: left, x2: width - right, y1: y(tick), y2: y(tick), class: "grid" }),
      svgElement("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, numberText(tick)));
  }
  svg.append(svgElement("text", { x: left, y: height - 5 }, `step ${first}`),
    svgElement("text", { x: width - right, y: height - 5, "text-anchor": "end" }, `step ${last}`));
  for (const line of chart.stacked ? lines.toReversed() : lines) {
    const colour = COLOURS[line.colour % COLOURS.length];
    const points = line.points.filter(([, value]) => value !== null), path = points.map(place).join(" ");
    if (chart.stacked && points.length) {
      const ends = [`${x(points[0][0])},${y(0)}`, path, `${x(points[points.length - 1][0])},${y(0)}`];
      svg.append(svgElement("polygon", { points: ends.join(" "), fill: colour }));
    } else {
      svg.append(svgElement("polyline", { points: path, stroke: colour, "stroke-dasharray": DASHES[line.side % DASHES.length], class: "curve" }));
      if (points.length < 40) for (const [cx, cy] of points.map((point) => place(point).split(","))) svg.append(svgElement("circle", { cx, cy, r: 2.2, fill: colour }));
    }
  }
  const cursor = svgElement("line", { y1: top, y2: height - bottom, class: "time" });
  svg.append(cursor);
  svg.addEventListener("pointermove", (event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(/** @type {SVGSVGElement} */ (svg).getScreenCTM()?.inverse());
    onMove(Math.round(first + (point.x - left) / (width - left - right) * (last - first)));
  });

  const figure = document.createElement("figure"), caption = document.createElement("figcaption"), title = document.createElement("b");
  title.textContent = `${chart.title} `;
  caption.append(title);
  const legend = chart.lines.map((line) => {
    const name = document.createElement("span"), key = document.createElement("i"), value = document.createElement("span");
    key.style.borderTop = `3px ${BORDERS[line.side % BORDERS.length]} ${COLOURS[line.colour % COLOURS.length]}`;
    value.className = "value";
    name.title = line.title ?? "";
    name.append(key, `${line.name} `, value);
    caption.append(name);
    return { line, value };
  });
  figure.append(caption, svg);
  const update = (/** @type {number} */ step) => {
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, String(x(step)));
    const texts = legend.map(({ line, value }) => {
      value.textContent = numberText(valueAt(line, step));
      return `${line.name} ${value.textContent}`;
    });
    return `${chart.title}: ${texts.join(", ")}`;
  };
  return { figure, update };
}

/** Returns what a chart shows in words. @param {Chart} chart @param {number} first @param {number} last */
function chartText(chart, first, last) {
  const ends = chart.lines.map((line) => `${line.name} from ${numberText(line.points[0]?.[1])} to ${numberText(line.points.at(-1)?.[1])}`);
  return `${chart.title} over steps ${first} to ${last}: ${ends.join(", ")}`;
}

/** Returns the steps of charts. @param {Chart[]} charts */
function stepsOf(charts) {
  return [...new Set(charts.flatMap((chart) => chart.lines.flatMap((line) => line.points.map(([step]) => step))))].sort((a, b) => a - b);
}

/** Adds a slider over the steps, and returns what shows charts below it. Shown again, the cursor stays at its step, or at
 * the last one. @param {Element} place @returns {(charts: Chart[]) => void} */
function makeChartGrid(place) {
  const label = document.createElement("label"), slider = document.createElement("input"), readout = document.createElement("output");
  const grid = document.createElement("div");
  /** @type {ReturnType<typeof drawChart>[]} */
  let drawn = [];
  /** @type {number[]} */
  let steps = [];
  const show = (/** @type {number} */ wanted) => {
    const step = Math.min(steps[steps.length - 1], Math.max(steps[0], wanted));
    slider.value = String(step);
    readout.value = `step ${step}`;
    slider.setAttribute("aria-valuetext", [readout.value, ...drawn.map((each) => each.update(step))].join("; "));
  };
  label.className = "slider";
  label.textContent = "step ";
  slider.type = "range";
  slider.step = "1";
  slider.addEventListener("input", () => show(Number(slider.value)));
  slider.addEventListener("keydown", (event) => {
    const ahead = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key], now = Number(slider.value);
    if (!ahead) return;
    event.preventDefault();
    show((ahead > 0 ? steps.find((step) => step > now) : steps.findLast((step) => step < now)) ?? now);
  });
  label.append(slider, readout);
  grid.className = "charts";
  place.append(label, grid);
  return (charts) => {
    const isAtEnd = steps.length === 0 || Number(slider.value) >= steps[steps.length - 1], before = Number(slider.value);
    steps = stepsOf(charts);
    label.hidden = steps.length < 2;
    /** @type {[number, number]} */
    const ends = [steps[0] ?? 0, steps.at(-1) ?? 0];
    [slider.min, slider.max] = ends.map(String);
    drawn = charts.map((chart) => drawChart(chart, ends, show));
    grid.replaceChildren(...drawn.map((each) => each.figure));
    if (steps.length) show(isAtEnd ? ends[1] : before);
  };
}

/** Adds the charts of all runs with their cursor. @param {Element} place @param {Curve[][]} sides */
function addCurves(place, sides) {
  const charts = chartsOf(sides);
  if (stepsOf(charts).length > 1) makeChartGrid(place)(charts);
}
