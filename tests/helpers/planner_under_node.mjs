// Answers questions to the planner under Node: reads {site, root, folder, questions: [[function, argument, …], …]} from
// standard input, and writes the list of answers. The files below `root` are there, and paths begin in `folder`.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const { site, root, folder, questions } = JSON.parse(readFileSync(0, "utf8"));
const { boot } = await import(pathToFileURL(`${site}/boot.mjs`));
const { loadPyodide } = await import(pathToFileURL(`${site}/pyodide/pyodide.mjs`));
const read = async (name) => new Uint8Array(readFileSync(`${site}/${name}`)).buffer;
const { pyodide, answers } = await boot(loadPyodide, read, () => {}, { stdout: console.error });
pyodide.FS.mkdirTree(root);
pyodide.mountNodeFS(root, root);
pyodide.FS.chdir(folder);
process.stdout.write(JSON.stringify(questions.map(([name, ...values]) => answers[name](...values))));
