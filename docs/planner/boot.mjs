// @ts-check
// Starts Python in WebAssembly with dslc in it. The worker of the page and the test under Node share this.

import { loadGraphviz } from "./graphviz.mjs";

/** @typedef {Record<string, (...values: any[]) => string>} Answers The functions of cli/planner/answers.py. */
/** @typedef {{runPython(code: string): any, unpackArchive(data: ArrayBuffer, format: string, options: object): void,
 *   FS: any, globals: any, pyimport(name: string): any}} Pyodide */

/** Returns the answers. @param {(options?: object) => Promise<Pyodide>} loadPyodide
 * @param {(name: string) => Promise<ArrayBuffer>} read reads a file beside this one
 * @param {(step: string) => void} report says what is loaded
 * @param {object} options of Pyodide @returns {Promise<{pyodide: Pyodide, answers: Answers}>} */
export async function boot(loadPyodide, read, report, options = {}) {
  const files = Promise.all(["python.zip", "graphviz.wasm", "facts.json"].map(read));
  report("Python");
  const pyodide = await loadPyodide(options);
  report("dslc");
  const [archive, graphviz, facts] = await files;
  const { stdlib_bytes } = JSON.parse(new TextDecoder().decode(facts));
  pyodide.unpackArchive(archive, "zip", { extractDir: "/planner" });
  pyodide.runPython("import sys; sys.path.insert(0, '/planner')");
  const answers = pyodide.pyimport("dslc.planner.answers");
  answers.start(await loadGraphviz(graphviz), stdlib_bytes);
  return { pyodide, answers };
}
