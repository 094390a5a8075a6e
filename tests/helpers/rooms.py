"""The rooms of the house and what each imports, from the code; `make rooms` writes them into CONTRIBUTING.md.

A room is a folder of modules; those at the root of a floor are a room as well. `ROOMS` lists them from the bottom to
the top, and each may import those that stand before it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

import networkx as nx

from helpers.paths import ROOT

PACKAGES = {"cli": "dslc", **{floor: f"dslc.{floor}" for floor in ("dsl", "compiler", "runtime", "grammar")}}
ROOMS = (
    "grammar",
    "dsl",
    "dsl/codes",
    "dsl/language",
    "dsl/syntax",
    "dsl/meaning",
    "dsl/editor",
    "compiler/ir",
    "compiler/facts",
    "compiler/placement",
    "compiler/model",
    "compiler/trace",
    "compiler/operations",
    "compiler/cost",
    "compiler/rules",
    "compiler/graph",
    "compiler/show",
    "compiler",
    "runtime/process",
    "runtime/transport",
    "runtime/hosts",
    "runtime/launchers",
    "runtime/data",
    "runtime/model",
    "runtime/technique",
    "runtime/optimizer",
    "runtime/parallel",
    "runtime/exchange",
    "runtime/pipeline",
    "runtime/step",
    "runtime/checkpoint",
    "runtime/measure",
    "runtime/loop",
    "runtime",
    "cli/terminal",
    "cli/probe",
    "cli/runs",
    "cli/loggers",
    "cli/jobs",
    "cli/verification",
    "cli/python_api",
    "cli/testing",
    "cli/launching",
    "cli/sweeps",
    "cli/conversion",
    "cli/proof",
    "cli/editor",
    "cli/planner",
    "cli/ui",
    "cli/commands",
    "cli",
)
# The files at the root of a floor; its docstring describes the whole floor.
AT_THE_ROOT = {
    "dsl": "Sources, diagnostics, bounds and words, which every room uses.",
    "compiler": "The story: compile a job to a plan, emit the programs of its ranks, write and read plan files.",
    "runtime": "The story: launch the ranks, one rank's life, the training loop.",
    "cli": "The command line: its options, and the module of each command.",
}
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- rooms, written by `make rooms` -->\n", "<!-- end of rooms -->\n"

# "typing" is an import under `if TYPE_CHECKING:`, which nothing loads.
Scope = Literal["module", "function", "typing"]


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported name, absolute and in full (`from dslc.dsl import source` is `dslc.dsl.source`)."""

    name: str
    line: int
    scope: Scope

    def is_within(self, *modules: str) -> bool:
        return any(self.name == module or self.name.startswith(module + ".") for module in modules)


def imports_of(source: str, package: str) -> list[Import]:
    """Returns every import of a module in `package`, anywhere in it, with those by `importlib` of a literal name."""
    return list(_imports(ast.parse(source), package, "module"))


def _imports(node: ast.AST, package: str, scope: Scope) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(name=alias.name, line=node.lineno, scope=scope) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parts = package.split(".")
        above = parts[: len(parts) - node.level + 1] if node.level else []
        origin = ".".join([*above, *([node.module] if node.module else [])])
        yield from (Import(name=f"{origin}.{alias.name}", line=node.lineno, scope=scope) for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
        match node.args:
            case [ast.Constant(value=str(name)), *_] if not name.startswith("."):
                yield Import(name=name, line=node.lineno, scope=scope)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        # Decorators and defaults run with the module; the body does not.
        for child in ast.iter_child_nodes(node):
            yield from _imports(child, package, "function" if child in node.body else scope)
    elif isinstance(node, ast.Lambda):
        yield from _imports(node.body, package, "function")
    elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        for child in node.body:
            yield from _imports(child, package, "typing")
        for child in node.orelse:
            yield from _imports(child, package, scope)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _imports(child, package, scope)


def room_of(module: str) -> str:
    """Returns the room of a module, by its path from the root."""
    parts = module.split("/")
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def modules() -> dict[str, str]:
    """Returns each module's full name, by its path from the root."""
    found = {}
    for floor, package in PACKAGES.items():
        for path in sorted((ROOT / floor).rglob("*.py")):
            inside = path.relative_to(ROOT / floor).with_suffix("").parts
            name = ".".join([package, *(inside[:-1] if inside[-1] == "__init__" else inside)])
            found[path.relative_to(ROOT).as_posix()] = name
    return found


@cache
def links() -> nx.DiGraph[str]:
    """Returns the imports between modules, by their paths; an import for types alone counts too."""
    paths = {name: path for path, name in modules().items()}
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(paths.values())
    for name, path in paths.items():
        package = name if path.endswith("__init__.py") else name.rpartition(".")[0]
        for found in imports_of((ROOT / path).read_text(encoding="utf-8"), package):
            target = found.name if found.name in paths else found.name.rpartition(".")[0]
            if target in paths and target != name:
                graph.add_edge(path, paths[target])
    return graph


def imports_between() -> nx.DiGraph[str]:
    """Returns the imports between rooms."""
    rooms: nx.DiGraph[str] = nx.DiGraph()
    rooms.add_nodes_from(ROOMS)
    rooms.add_edges_from({(room_of(a), room_of(b)) for a, b in links().edges if room_of(a) != room_of(b)})
    return rooms


def page() -> str:
    """Returns the drawing and the table for CONTRIBUTING.md."""
    rooms = imports_between()
    return f"{BEGIN}{_drawing(rooms)}\n{_table(rooms)}{END}"


def _drawing(rooms: nx.DiGraph[str]) -> str:
    """Returns a Mermaid flowchart, without imports that follow from others."""
    lines = ["```mermaid", "flowchart BT"]
    for floor in PACKAGES:
        lines.append(f'  subgraph {floor}_["{floor}"]')
        lines += [f'    {_node(room)}["{_short(room)}"]' for room in ROOMS if room.split("/")[0] == floor]
        lines.append("  end")
    drawn = nx.transitive_reduction(rooms)
    lines += [f"  {_node(above)} --> {_node(below)}" for above, below in sorted(drawn.edges)]
    return "\n".join([*lines, "```"]) + "\n"


def _node(room: str) -> str:
    return room.replace("/", "_")


def _short(room: str) -> str:
    return room.partition("/")[2] or f"{room}/*.py"


def _table(rooms: nx.DiGraph[str]) -> str:
    lines = ["| room | files | what it is | imports |", "| --- | ---: | --- | --- |"]
    counts = _counts()
    for room in ROOMS:
        below = ", ".join(f"`{other}`" for other in ROOMS if rooms.has_edge(room, other))
        lines.append(f"| `{room}` | {counts[room]} | {_sentence(room)} | {below or '–'} |")
    return "\n".join(lines) + "\n"


def _counts() -> Mapping[str, int]:
    paths = [path for path in modules() if not path.endswith("__init__.py")]
    return {room: sum(room_of(path) == room for path in paths) for room in ROOMS}


def _sentence(room: str) -> str:
    if room in AT_THE_ROOT:
        return AT_THE_ROOT[room]
    text = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text(encoding="utf-8")))
    return (text or "").partition("\n")[0]


def write() -> None:
    """Writes drawing and table into CONTRIBUTING.md."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + page() + after, encoding="utf-8")


if __name__ == "__main__":
    write()
