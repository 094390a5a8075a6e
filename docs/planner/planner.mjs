// @ts-check
// The page of the planner: a text with its mistakes, the plan beside it, and a worker that computes both. No library.
// The address holds the job, `#job=…`, so that a link opens it; what follows `#` is sent to no server.

/** @typedef {{code: string, severity: string, message: string, help: string | null, line: number | null, column: number | null,
 *   start: number | null, end: number | null}} Mistake */
/** @typedef {{diagnostics: Mistake[], tokens: [number, number, string][], hints: [number, string][], status: string}} Edit */
/** @typedef {{diagnostics: Mistake[], count: string, head: string[], picture: string,
 *   rows: {cells: string[], text: string}[]}} Choice */

const PAUSE = 250; // milliseconds from a keystroke to the analysis

/** @template {HTMLElement} T @param {string} name @param {new () => T} kind @returns {T} */
function element(name, kind) {
  const node = document.getElementById(name);
  if (!(node instanceof kind)) throw new Error(`no ${name}`);
  return node;
}

const text = element("text", HTMLTextAreaElement);
const shown = element("shown", HTMLPreElement);
const status = element("status", HTMLParagraphElement);
const examples = element("examples", HTMLSelectElement);
const summary = /** @type {HTMLPreElement} */ (element("summary", HTMLDivElement).querySelector("pre"));
const pictures = /** @type {HTMLIFrameElement} */ (element("pictures", HTMLDivElement).querySelector("iframe"));
const file = element("file", HTMLAnchorElement);
const progress = element("progress", HTMLProgressElement);
const search = element("search", HTMLButtonElement);

// ---------------------------------------------------------------------------------------------------- the worker

const worker = new Worker(new URL("worker.mjs", import.meta.url), { type: "module" });
/** @type {Map<number, {resolve(answer: string): void, reject(error: Error): void}>} */
const waiting = new Map();
let requests = 0;

/** Returns an answer of cli/planner/answers.py. @param {string} name @param {unknown[]} values @returns {Promise<string>} */
function ask(name, ...values) {
  const id = ++requests;
  worker.postMessage({ id, name, values });
  return new Promise((resolve, reject) => waiting.set(id, { resolve, reject }));
}

worker.addEventListener("message", ({ data }) => {
  if (data.failure !== undefined) say(`The planner could not start: ${data.failure}`, true);
  else if (data.step !== undefined) say(data.step ? `loading ${data.step} …` : "planning …");
  else if (data.total !== undefined) {
    progress.max = data.total;
    progress.value = data.done;
  } else {
    const request = waiting.get(data.id);
    waiting.delete(data.id);
    if (data.error === undefined) request?.resolve(data.answer);
    else request?.reject(new Error(data.error));
  }
});
worker.addEventListener("error", () => say(location.protocol === "file:"
  ? "A browser runs this page from a server alone: python -m http.server -d build/site"
  : "The planner could not start: its files are not beside this page.", true));

/** @param {string} words @param {boolean} isBad */
function say(words, isBad = false) {
  status.textContent = words;
  status.classList.toggle("bad", isBad);
}

// ------------------------------------------------------------------------------------------------------ the text

/** Returns the pieces of a text that its tokens, mistakes and hints divide it into, with their classes.
 * @param {string} words @param {Edit} edit @returns {[string, string[]][]} */
function pieces(words, edit) {
  const ranges = [
    ...edit.tokens,
    ...edit.diagnostics.flatMap(({ start, end, severity }) => /** @type {[number, number, string][]} */ (
      start === null || end === null ? [] : [[start, Math.max(end, start + 1), severity]])),
  ];
  const lineEnd = (/** @type {number} */ at) => words.indexOf("\n", at) < 0 ? words.length : words.indexOf("\n", at);
  /** @type {Map<number, string[]>} */
  const hints = new Map();
  for (const [at, label] of edit.hints) hints.set(lineEnd(at), [...(hints.get(lineEnd(at)) ?? []), label]);
  const cuts = [...new Set([0, words.length, ...hints.keys(), ...ranges.flatMap(([start, end]) => [start, end])])]
    .filter((at) => at <= words.length).sort((a, b) => a - b);
  return cuts.flatMap((at, n) => /** @type {[string, string[]][]} */ ([
    ...(hints.has(at) ? [[`  ${hints.get(at)?.join("  ")}`, ["hint"]]] : []),
    ...(n + 1 < cuts.length ? [[words.slice(at, cuts[n + 1]), ranges.filter(([start, end]) => start <= at && at < end)
      .map(([, , kind]) => kind)]] : []),
  ]));
}

/** Spans of offsets count characters of Python, which are code points. @param {string} words @param {Edit} edit @returns {Edit} */
function inCodeUnits(words, edit) {
  if (![...words].some((letter) => letter.length > 1)) return edit;
  const places = [0];
  for (const letter of words) places.push(/** @type {number} */ (places.at(-1)) + letter.length);
  const place = (/** @type {number} */ at) => places[at] ?? words.length;
  return { ...edit,
    tokens: edit.tokens.map(([start, end, kind]) => [place(start), place(end), kind]),
    hints: edit.hints.map(([at, label]) => [place(at), label]),
    diagnostics: edit.diagnostics.map((each) => ({ ...each, start: each.start === null ? null : place(each.start),
      end: each.end === null ? null : place(each.end) })) };
}

/** @param {string} words @param {Edit} edit */
function showText(words, edit) {
  shown.replaceChildren(...pieces(words, edit).map(([piece, kinds]) => {
    const span = document.createElement("span");
    span.className = kinds.join(" ");
    span.textContent = piece;
    return span;
  }), "\n");
  follow();
}

function follow() {
  shown.scrollTop = text.scrollTop;
  shown.scrollLeft = text.scrollLeft;
}

/** @param {Mistake[]} mistakes */
function mistakeItems(mistakes) {
  return mistakes.map(({ code, severity, message, help, line, column, start, end }) => {
    const item = document.createElement("li"), kind = document.createElement("b"), page = document.createElement("a");
    kind.className = kind.textContent = severity;
    page.href = `../codes/${code.replace(/^[WN]/, "E")}/`;
    page.textContent = code;
    item.append(kind, " ", page, " ");
    if (line !== null && start !== null) {
      const place = document.createElement("button");
      place.className = "place";
      place.textContent = `line ${line}, column ${column}`;
      place.addEventListener("click", () => {
        text.focus();
        text.setSelectionRange(start, end);
      });
      item.append(place, ": ");
    }
    item.append(message);
    if (help) {
      const advice = document.createElement("span");
      advice.className = "help";
      advice.textContent = `help: ${help}`;
      item.append(advice);
    }
    return item;
  });
}

// ------------------------------------------------------------------------------------------------------ the plan

let planned = /** @type {string | null} */ (null), isPlanning = false, timer = 0;
let summarized = "", pictured = ""; // the texts whose plan and whose pictures are shown

/** Analyses the text and plans it, and again if it has changed meanwhile. */
async function plan() {
  if (isPlanning) return;
  isPlanning = true;
  try {
    while (planned !== text.value) {
      const words = text.value;
      const edit = inCodeUnits(words, /** @type {Edit} */ (JSON.parse(await ask("edit", words))));
      planned = words;
      if (text.value !== words) continue;
      showText(words, edit);
      element("mistakes", HTMLOListElement).replaceChildren(...mistakeItems(edit.diagnostics));
      const count = edit.diagnostics.filter((each) => each.severity === "error").length;
      say(edit.status || `${count} error${count === 1 ? "" : "s"}`, !edit.status);
      if (edit.status) await showPlan(words);
    }
  } catch (error) {
    say(String(error), true);
  } finally {
    isPlanning = false;
  }
}

/** Shows the plan of a text, unless the text changes meanwhile. @param {string} words */
async function showPlan(words) {
  const lines = await ask("summary", words);
  if (!lines || text.value !== words) return;
  summary.textContent = lines;
  summary.classList.remove("stale");
  const planFile = new Blob([await ask("plan", words)], { type: "application/json" });
  if (text.value !== words) return;
  URL.revokeObjectURL(file.href);
  file.href = URL.createObjectURL(planFile);
  file.hidden = false;
  summarized = words;
  await showPictures();
}

/** Shows the pictures of the plan that is shown, once their tab is open: a hidden frame gives its boxes no sizes. */
async function showPictures() {
  const words = summarized;
  if (text.value !== words || pictured === words || pictures.closest("[hidden]")) return;
  const page = await ask("page", words);
  if (text.value !== words) return;
  URL.revokeObjectURL(pictures.src);
  pictures.src = URL.createObjectURL(new Blob([page], { type: "text/html" }));
  pictures.classList.remove("stale");
  pictured = words;
}

/** Writes the job into the address. @param {string} words @param {"pushState" | "replaceState"} change */
function remember(words, change) {
  try {
    history[change](null, "", `#job=${encodeURIComponent(words)}`);
  } catch {
    // A browser limits how long an address is and how often it changes. The job is planned all the same.
  }
}

/** @param {string} words */
function open(words) {
  text.value = words;
  text.scrollTop = 0;
  changed(0);
}

/** Replaces the text that is being edited, to which the browser's "back" returns. @param {string} words */
function replaceText(words) {
  if (words === text.value) return;
  remember(text.value, "replaceState");
  remember(words, "pushState");
  open(words);
}

/** @param {number} pause */
function changed(pause) {
  planned = null;
  summarized = pictured = "";
  file.hidden = true;
  for (const view of [summary, pictures]) view.classList.add("stale");
  markChoice();
  showText(text.value, { diagnostics: [], tokens: [], hints: [], status: "" });
  clearTimeout(timer);
  timer = setTimeout(() => {
    plan();
    remember(text.value, "replaceState");
  }, pause);
}

// ---------------------------------------------------------------------------------------------------- the choice

/** The texts that the plans of the choice are written into: that of the search, and those with a plan of it.
 * @type {Set<string>} */
let choosable = new Set();

function markChoice() {
  for (const name of ["plans", "picture"]) {
    document.getElementById(name)?.classList.toggle("stale", !choosable.has(text.value));
  }
}

async function choose() {
  search.disabled = true;
  progress.hidden = false;
  progress.removeAttribute("value");
  try {
    const words = text.value;
    showChoice(words, /** @type {Choice} */ (JSON.parse(await ask("choose_table", words, "job.plt"))));
  } catch (error) {
    element("count", HTMLParagraphElement).textContent = String(error);
  } finally {
    search.disabled = false;
    progress.hidden = true;
  }
}

/** @param {string} searched @param {Choice} choice */
function showChoice(searched, { diagnostics, count, head, rows, picture }) {
  choosable = new Set([searched, ...rows.map((row) => row.text)]);
  element("count", HTMLParagraphElement).textContent = count;
  element("reasons", HTMLOListElement).replaceChildren(...mistakeItems(diagnostics));
  const table = document.createElement("table");
  if (rows.length) {
    const titles = table.createTHead().insertRow();
    for (const name of [...head, ""]) titles.append(Object.assign(document.createElement("th"), { textContent: name }));
  }
  const body = table.createTBody();
  for (const { cells, text: words } of rows) {
    const row = body.insertRow();
    for (const cell of cells) row.insertCell().textContent = cell;
    const button = Object.assign(document.createElement("button"), { textContent: "write it", title: "into the job" });
    button.addEventListener("click", () => {
      if (choosable.has(text.value)) replaceText(words);
      else say("the job has changed since the search: search again", true);
    });
    row.insertCell().append(button);
  }
  element("plans", HTMLDivElement).replaceChildren(table);
  element("picture", HTMLDivElement).innerHTML = picture.slice(picture.indexOf("<svg")); // drawn by Graphviz, which escapes
  markChoice();
}

// ---------------------------------------------------------------------------------------------------- the page

const tabs = /** @type {HTMLButtonElement[]} */ ([...document.querySelectorAll("[role=tab]")]);

/** @param {HTMLButtonElement} chosen */
function selectTab(chosen) {
  for (const tab of tabs) {
    tab.ariaSelected = String(tab === chosen);
    tab.tabIndex = tab === chosen ? 0 : -1;
    const panel = document.getElementById(tab.getAttribute("aria-controls") ?? "");
    if (panel) panel.hidden = tab !== chosen;
  }
  showPictures().catch((error) => say(String(error), true));
}

for (const [n, tab] of tabs.entries()) {
  tab.addEventListener("click", () => selectTab(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = step && tabs[(n + step + tabs.length) % tabs.length];
    if (next) {
      selectTab(next);
      next.focus();
    }
  });
}
text.addEventListener("input", () => changed(PAUSE));
text.addEventListener("scroll", follow);
search.addEventListener("click", choose);

/** @returns {string | null} */
const fromAddress = () => new URLSearchParams(location.hash.slice(1)).get("job");
addEventListener("hashchange", () => {
  const words = fromAddress();
  if (words !== null && words !== text.value) open(words);
});

say("loading …");
/** @type {Record<string, string>} */
const jobs = await fetch("examples.json").then((response) => response.json()).catch(() => ({}));
for (const name of Object.keys(jobs)) examples.add(new Option(name, name));
examples.addEventListener("change", () => replaceText(jobs[examples.value] ?? text.value));
const words = fromAddress();
if (words === null) examples.value = "digits.plt";
open(words ?? jobs["digits.plt"] ?? "");
