// @ts-check
// A cursor in the schedule: the moment under the pointer or of a slider, and what each drawn row does and holds then.

/** @typedef {[string, number, string, number, number, number | null]} Pass kind, stage, micro-batch, start, end, most bytes */
/** @typedef {[number, number, number, number]} Held start, end, micro-batches, bytes */
/** @typedef {{pipeline: number, first: number, last: number, rest: number | null, peak: number | null, moment: string,
 *   passes: Pass[], held: Held[]}} TimelineRow */
/** @typedef {{timed: boolean, total: number, spans: [number, number, number, number][], rows: TimelineRow[]}} Timeline */
/** @typedef {{does: string, pieces: number, activations: number, onTop: number | null, together: number | null}} Moment */

const PASSES = /** @type {Record<string, string>} */ ({ E: "output ahead", F: "forward", B: "backward",
  I: "backward of the input", W: "backward of the weights", exchange: "exchange of gradients", rest: "samples and rest" });
const PARTS_NOTE = "State is what a rank holds between two steps, activations are those kept for the backward pass. ";
const MOMENTS_NOTE = "On top come what a layer works in, gradients made in the step and gathered parameters: the most during the "
  + "pass at the cursor. While a rank waits, this is not known.";
const MEMORY_NOTE = "What a layer works in, gradients made in the step and gathered parameters come on top, at most up to the peak. "
  + "Only the analysis of the job has them, and not a plan file.";
const SAID_ROWS = 4; // rows that a screen reader hears at each move

/** Returns what a row does and holds at a time. @param {TimelineRow} row @param {number} time @returns {Moment} */
function momentOf(row, time) {
  const pass = lastBefore(row.passes, (each) => each[3], time), kept = lastBefore(row.held, (each) => each[0], time);
  const [pieces, activations] = kept && time < kept[1] ? [kept[2], kept[3]] : [0, 0];
  const isOn = pass && (time < pass[4] || pass === row.passes.at(-1));
  const name = isOn ? PASSES[pass[0]] ?? pass[0] : "waits";
  const does = isOn && pass[0].length === 1 ? `${name} of micro-batch ${pass[2]}, stage ${pass[1]}` : name;
  const held = row.rest === null ? null : row.rest + activations, most = isOn ? pass[5] : null;
  const onTop = held === null || most === null ? null : Math.max(0, most - held);
  return { does, pieces, activations, onTop, together: held === null ? null : held + (onTop ?? 0) };
}

/** Returns the times at which something begins or ends. @param {Timeline} timeline */
function edgesOf(timeline) {
  const times = timeline.rows.flatMap((row) => row.passes.flatMap((pass) => [pass[3], pass[4]]));
  return [...new Set([0, ...times, timeline.total])].sort((a, b) => a - b);
}

/** Returns the place of a time from the left edge of a row; undefined where it is left out.
 * @param {Timeline} timeline @param {number} time */
function placeOf(timeline, time) {
  const span = timeline.spans.find(([, , start, end]) => start <= time && time <= end);
  return span && span[0] + (time - span[2]) / (span[3] - span[2] || 1) * (span[1] - span[0]);
}

/** Returns the time at a place; the nearest that is shown. @param {Timeline} timeline @param {number} place */
function timeAt(timeline, place) {
  const distance = (/** @type {number[]} */ [left, right]) => Math.max(left - place, place - right, 0);
  const [left, right, start, end] = timeline.spans.reduce((best, each) => distance(each) < distance(best) ? each : best);
  return start + (Math.min(right, Math.max(left, place)) - left) / (right - left || 1) * (end - start);
}

/** True if the memory of passes is known. @param {Timeline} timeline */
function hasMoments(timeline) {
  return timeline.rows.some((row) => row.passes.some((pass) => pass[5] !== null));
}

/** Returns a time at which the rows hold most: within the pass that holds most, else with most activations.
 * @param {Timeline} timeline */
function fullestTime(timeline) {
  const passes = timeline.rows.flatMap((row) => row.passes.filter((pass) => pass[5] !== null));
  if (passes.length) return passes.reduce((most, each) => Number(each[5]) > Number(most[5]) ? each : most)[3];
  const all = timeline.rows.flatMap((row) => row.held);
  return all.length ? all.reduce((most, each) => each[3] > most[3] ? each : most)[0] : 0;
}

/** Names a moment of the step. @param {Timeline} timeline @param {number} time */
function momentText({ timed, total }, time) {
  return timed ? `${timeText(time)} of ${timeText(total)}` : `${Math.round(100 * time / total)}% of the step`;
}

/** Adds the cursor to a schedule view, with its slider and table in `place`. Returns what moves it.
 * @param {HTMLElement} canvas @param {HTMLElement} place @param {Timeline} timeline
 * @param {(time: number) => void} [onMove] @returns {(time: number) => void} */
function makeCursor(canvas, place, timeline, onMove) {
  const svg = /** @type {SVGSVGElement} */ (canvas.querySelector("svg"));
  const rows = /** @type {SVGGElement[]} */ ([...svg.querySelectorAll("[data-row]")]);
  const boxes = rows.map((row) => row.getBBox());
  const left = boxes[0]?.x ?? 0;
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  line.classList.add("time");
  line.setAttribute("y1", String(Math.min(...boxes.map((box) => box.y)) - 6));
  line.setAttribute("y2", String(Math.max(...boxes.map((box) => box.y + box.height)) + 24));
  const sheet = /** @type {SVGGElement} */ (svg.querySelector("g"));
  sheet.append(line);

  const label = document.createElement("label"), slider = document.createElement("input"), readout = document.createElement("output");
  label.textContent = "moment ";
  slider.type = "range";
  slider.min = "0";
  slider.max = String(timeline.total);
  slider.step = "any";
  label.append(slider, readout);
  const { table, update } = momentTable(timeline);
  const note = document.createElement("p");
  note.textContent = PARTS_NOTE + (hasMoments(timeline) ? MOMENTS_NOTE : MEMORY_NOTE);
  label.className = "slider";
  note.className = "note";
  place.append(label, table, note);

  const edges = edgesOf(timeline);
  let now = 0;
  const show = (/** @type {number} */ time) => {
    now = Math.min(timeline.total, Math.max(0, time));
    const x = placeOf(timeline, now);
    line.classList.toggle("hidden", x === undefined);
    if (x !== undefined) for (const end of ["x1", "x2"]) line.setAttribute(end, String(left + x));
    slider.value = String(now);
    readout.value = momentText(timeline, now);
    slider.setAttribute("aria-valuetext", [readout.value, ...update(now).slice(0, SAID_ROWS)].join("; "));
  };
  const move = (/** @type {number} */ time) => {
    show(time);
    onMove?.(now);
  };
  const follow = (/** @type {PointerEvent} */ event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(sheet.getScreenCTM()?.inverse());
    move(timeAt(timeline, point.x - left));
  };
  svg.addEventListener("pointermove", (event) => { if (event.buttons === 0) follow(event); });
  svg.addEventListener("pointerdown", follow);
  slider.addEventListener("input", () => move(Number(slider.value)));
  slider.addEventListener("keydown", (event) => {
    const ahead = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
    if (!ahead) return;
    event.preventDefault();
    const next = ahead > 0 ? edges.find((edge) => edge > now) : edges.findLast((edge) => edge < now);
    if (next !== undefined) move(next);
  });
  show(fullestTime(timeline));
  return show;
}

/** Returns the table of a moment, and what brings it to a time and returns its rows in words.
 * @param {Timeline} timeline @returns {{table: HTMLTableElement, update: (time: number) => string[]}} */
function momentTable(timeline) {
  const table = document.createElement("table"), head = table.createTHead().insertRow(), body = table.createTBody();
  const titles = ["ranks", "work", "state", "activations", ...(hasMoments(timeline) ? ["on top"] : []), "together", "peak"];
  for (const title of titles) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.textContent = title;
    head.append(cell);
  }
  const most = Math.max(1, ...timeline.rows.map((row) => row.peak ?? 0));
  const lines = timeline.rows.map((row) => {
    const line = body.insertRow(), name = document.createElement("th");
    name.scope = "row";
    name.textContent = ranksText(row.first, row.last).replace(/^ranks? /, "").replace(" to ", "–");
    line.append(name);
    const [does, state, activations] = Array.from({ length: 3 }, () => line.insertCell());
    const onTop = hasMoments(timeline) ? line.insertCell() : null, together = line.insertCell(), peak = line.insertCell();
    const unknown = "unknown";
    state.textContent = row.rest === null ? unknown : byteText(row.rest);
    peak.textContent = row.peak === null ? unknown : byteText(row.peak);
    peak.title = row.moment;
    const sum = document.createElement("span"), bar = document.createElement("meter");
    bar.max = most;
    bar.ariaHidden = "true";
    together.append(bar, sum);
    return { row, does, activations, onTop, sum, bar, unknown };
  });
  const update = (/** @type {number} */ time) => lines.map(({ row, does, activations, onTop, sum, bar, unknown }) => {
    const moment = momentOf(row, time);
    does.textContent = moment.does;
    activations.textContent = moment.pieces ? `${byteText(moment.activations)} of ${plural(moment.pieces, "micro-batch")}` : "none";
    if (onTop) onTop.textContent = moment.onTop === null ? "–" : byteText(moment.onTop);
    sum.textContent = moment.together === null ? unknown : byteText(moment.together);
    bar.value = moment.together ?? 0;
    return `${ranksText(row.first, row.last)}: ${moment.does}, ${sum.textContent}`;
  });
  return { table, update };
}
