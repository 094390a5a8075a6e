// @ts-check
// The worker of the page: answers one request after another, and says what it is loading.

import { boot } from "./boot.mjs";
// @ts-ignore - `make docs` puts it there
import { loadPyodide } from "./pyodide/pyodide.mjs";

/** @typedef {{id: number, name: string, values: unknown[]}} Request */

const read = async (/** @type {string} */ name) => {
  const response = await fetch(new URL(name, import.meta.url));
  if (!response.ok) throw new Error(`${name}: ${response.status} ${response.statusText}`);
  return response.arrayBuffer();
};

const booted = boot(loadPyodide, read, (step) => postMessage({ step }));
booted.then(() => postMessage({ step: "" }), (error) => postMessage({ failure: String(error) }));

addEventListener("message", async (event) => {
  const { id, name, values } = /** @type {Request} */ (event.data);
  try {
    const { answers } = await booted;
    const progress = (/** @type {number} */ done, /** @type {number} */ total) => postMessage({ id, done, total });
    const more = name === "choose_table" ? [progress] : [];
    postMessage({ id, answer: answers[name](...values, ...more) });
  } catch (error) {
    postMessage({ id, error: String(error) });
  }
});
