// Compiles the modules of a zip file with the Python of Pyodide: `node compile_python.mjs PYODIDE FROM TO`. A page that
// had to compile them itself would begin several seconds later. docs/planner_site.py calls it.
import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [pyodideFolder, from, to] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(`${pyodideFolder}/pyodide.mjs`));
const pyodide = await loadPyodide();
pyodide.unpackArchive(new Uint8Array(readFileSync(from)).buffer, "zip", { extractDir: "/planner" });
pyodide.runPython(`
import compileall, os, py_compile, zipfile

mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
assert compileall.compile_dir("/planner", quiet=1, legacy=True, invalidation_mode=mode)
with zipfile.ZipFile("/compiled.zip", "w", zipfile.ZIP_DEFLATED) as archive:
    for folder, _, names in os.walk("/planner"):
        for name in names:
            path = os.path.join(folder, name)
            if not name.endswith(".py"):
                with open(path, "rb") as file:
                    info = zipfile.ZipInfo(os.path.relpath(path, "/planner"))
                    archive.writestr(info, file.read(), zipfile.ZIP_DEFLATED)
`);
writeFileSync(to, pyodide.FS.readFile("/compiled.zip"));
