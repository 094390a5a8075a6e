// @ts-check
// The table of the runs, and the filters beside it.

/** @typedef {{key: string, isDescending: boolean}} Order the column of a table by its key, "" for the names */
/** @typedef {{runs: Run[], columns: Column[], order: Order, isShown: (run: Run) => boolean, onToggle: (run: Run) => void,
 *   onSort: (key: string) => void}} TableView */

/** Returns what shows runs in a table in `place`: it changes what has changed, so that focus and scrolling stay.
 * @param {Element} place @returns {(view: TableView) => void} */
function makeTable(place) {
  const table = document.createElement("table"), head = table.createTHead().insertRow(), body = table.createTBody();
  table.className = "figures";
  place.append(table);
  /** @type {Map<string, HTMLTableRowElement>} */
  const rows = new Map();
  let columnKeys = "";
  return ({ runs, columns, order, isShown, onToggle, onSort }) => {
    const titles = [["", "run"], ...columns.map(({ key, label }) => [key, label])], keys = JSON.stringify(titles);
    if (keys !== columnKeys) {
      columnKeys = keys;
      rows.clear();
      head.replaceChildren(headCell("curves"), ...titles.map(([key, label]) => sortedCell(key, label, onSort)));
    }
    for (const cell of head.querySelectorAll("[data-key]")) {
      const isKey = /** @type {HTMLElement} */ (cell).dataset.key === order.key;
      cell.setAttribute("aria-sort", isKey ? order.isDescending ? "descending" : "ascending" : "none");
    }
    const shown = runs.map((run) => {
      const row = rows.get(run.name) ?? newRow(run, columns.length, onToggle);
      rows.set(run.name, row);
      const box = /** @type {HTMLInputElement} */ (row.querySelector("input"));
      box.checked = isShown(run);
      columns.forEach((column, n) => {
        const text = column.kind === "state" ? stateText(run) : cellOf(run, column)?.text ?? "";
        const cell = row.cells[n + 2];
        if (cell.textContent !== text) cell.textContent = text;
        cell.title = column.kind === "state" ? run.line : "";
        if (column.kind === "state") cell.className = `state ${run.state}`;
      });
      return row;
    });
    if (shown.length !== body.rows.length || shown.some((row, n) => body.rows[n] !== row)) body.replaceChildren(...shown);
  };
}

/** @param {string} text */
function headCell(text) {
  const cell = document.createElement("th");
  cell.scope = "col";
  cell.textContent = text;
  return cell;
}

/** @param {string} key @param {string} label @param {(key: string) => void} onSort */
function sortedCell(key, label, onSort) {
  const cell = headCell(""), button = document.createElement("button");
  cell.dataset.key = key;
  button.textContent = label;
  button.addEventListener("click", () => onSort(key));
  cell.append(button);
  return cell;
}

/** @param {Run} run @param {number} count @param {(run: Run) => void} onToggle */
function newRow(run, count, onToggle) {
  const row = document.createElement("tr"), label = document.createElement("label"), box = document.createElement("input");
  const name = document.createElement("th"), key = document.createElement("i"), { colour, side } = lineStyle(run);
  box.type = "checkbox";
  box.ariaLabel = `curves of run ${run.number}, ${run.name}`;
  box.addEventListener("change", () => onToggle(run));
  key.style.borderTop = `3px ${BORDERS[side % BORDERS.length]} ${COLOURS[colour]}`;
  label.append(box, key, String(run.number));
  row.insertCell().append(label);
  name.scope = "row";
  name.textContent = run.name;
  row.append(name);
  for (let n = 0; n < count; n++) row.insertCell();
  return row;
}

/** @param {Run} run */
function stateText({ state, step, steps }) {
  const isPlain = state === "done" || state === "unknown" || (state === "waiting" && !steps);
  return isPlain ? state : `${state} ${step}/${steps || "?"}`;
}

// -------------------------------------------------------------------------------------------------------- filters

/** @typedef {{runs: Run[], columns: Column[], outcome: Column | undefined, filters: Map<string, Filter>,
 *   onFilter: (column: Column, filter: Filter | null) => void, onClear: () => void}} FilterView */

const MOST_OPEN = 8; // values of a list that is open at first
const NARROW = 720; // pixels of a page whose lists are closed at first

/** Returns what shows the filters in `place`. It is made anew if values have changed; the focus stays,
 * and so does a number that is being typed: then it is made anew later.
 * @param {Element} place @returns {(view: FilterView) => void} */
function makeFilters(place) {
  let before = "";
  /** @type {Map<string, boolean>} */
  const isOpen = new Map();
  return ({ runs, columns, outcome, filters, onFilter, onClear }) => {
    const values = columns.map((column) => ({ column, counts: valueCounts(runs, column) }));
    const now = JSON.stringify([values, outcome, [...filters].map(([key, filter]) => [key, "values" in filter ? [...filter.values] : filter])]);
    if (now === before || isBeingTyped(place)) return;
    before = now;
    const focused = document.activeElement instanceof HTMLElement ? document.activeElement.dataset.focus : undefined;
    const heading = document.createElement("h2"), clear = document.createElement("button");
    heading.textContent = "filters";
    clear.textContent = "clear all";
    clear.hidden = filters.size === 0;
    clear.addEventListener("click", onClear);
    heading.append(" ", clear);
    place.replaceChildren(heading,
      ...values.map(({ column, counts }) => valueFilter(column, counts, filters.get(column.key), isOpen, onFilter)),
      ...(outcome ? [rangeFilter(outcome, filters.get(outcome.key), onFilter)] : []));
    if (focused) for (const element of place.querySelectorAll("[data-focus]")) {
      if (element instanceof HTMLElement && element.dataset.focus === focused) element.focus();
    }
  };
}

/** True while the number in a field has been edited, and not been taken. @param {Element} place */
function isBeingTyped(place) {
  const field = document.activeElement;
  return field instanceof HTMLInputElement && place.contains(field) && field.dataset.edited === "true";
}

/** @param {Column} column @param {[string, number][]} counts @param {Filter | undefined} filter @param {Map<string, boolean>} isOpen
 * @param {(column: Column, filter: Filter | null) => void} onFilter */
function valueFilter(column, counts, filter, isOpen, onFilter) {
  const details = document.createElement("details"), summary = document.createElement("summary");
  const kept = new Set(counts.map(([text]) => text).filter((text) => !filter || !("values" in filter) || filter.values.has(text)));
  summary.textContent = `${column.label}${kept.size < counts.length ? `: ${kept.size} of ${counts.length}` : ""}`;
  summary.title = column.name;
  summary.dataset.focus = column.key;
  details.open = isOpen.get(column.key) ?? (counts.length <= MOST_OPEN && innerWidth > NARROW);
  details.addEventListener("toggle", () => isOpen.set(column.key, details.open));
  details.append(summary, ...counts.map(([text, count]) => {
    const label = document.createElement("label"), box = document.createElement("input"), many = document.createElement("span");
    box.type = "checkbox";
    box.checked = kept.has(text);
    box.dataset.focus = `${column.key} ${text}`;
    many.className = "value";
    many.textContent = String(count);
    box.addEventListener("change", () => {
      if (box.checked) kept.add(text); else kept.delete(text);
      onFilter(column, kept.size === counts.length ? null : { values: kept });
    });
    label.append(box, `${text} `, many);
    return label;
  }));
  return details;
}

/** @param {Column} column @param {Filter | undefined} filter @param {(column: Column, filter: Filter | null) => void} onFilter */
function rangeFilter(column, filter, onFilter) {
  const set = document.createElement("fieldset"), legend = document.createElement("legend");
  legend.textContent = column.label;
  const range = filter && "low" in filter ? filter : { low: -Infinity, high: Infinity };
  const inputs = /** @type {const} */ (["low", "high"]).map((end) => {
    const label = document.createElement("label"), input = document.createElement("input");
    input.type = "number";
    input.step = "any";
    const text = Number.isFinite(range[end]) ? String(Number(range[end].toPrecision(6))) : "";
    input.value = text;
    input.dataset.focus = `${column.key} ${end}`;
    label.append(end === "low" ? "from " : "to ", input);
    input.addEventListener("input", () => { input.dataset.edited = "true"; });
    input.addEventListener("change", () => {
      input.dataset.edited = "false";
      const [low, high] = inputs.map(({ value }) => value());
      onFilter(column, low === -Infinity && high === Infinity ? null : { low, high });
    });
    const none = end === "low" ? -Infinity : Infinity;
    const value = () => input.value === text ? range[end] : input.value ? Number(input.value) : none; // as it was, if it is not edited
    return { label, value };
  });
  set.append(legend, ...inputs.map(({ label }) => label));
  return set;
}
