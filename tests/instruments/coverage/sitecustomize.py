"""Records which statements of dslc run, in every process that has this folder on PYTHONPATH.

Python imports a module of this name when it starts. From then on each statement of dslc writes one byte of a file that
all processes share, so that forked ranks and killed processes count, and tests take hardly longer. Tools that trace
would slow the compiler down several times, and keep nothing of a process that is killed.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib.machinery
import marshal
import mmap
import os
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parents[3]
FLOORS = ("cli", "compiler", "dsl", "runtime")
# Folders and files of what runs inside of a module's forward pass, which torch's compiler follows: it knows no record.
COMPILED = ("runtime/model", "runtime/parallel", "runtime/pipeline", "runtime/technique")
COMPILED_FILES = ("compiler/trace/private_torch.py",)
VARIABLE = "DSLC_COVERAGE"  # names the shared file
BYTES = "__dslc_statements__"  # the name under which all modules find it


def offsets() -> tuple[dict[str, int], int]:
    """Returns where the lines of each source file begin in the shared file, and its size."""
    table, end = {}, 0
    compiled_rooms = {ROOT / room for room in COMPILED}
    for path in sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py")):
        if not compiled_rooms.isdisjoint(path.parents) or path.relative_to(ROOT).as_posix() in COMPILED_FILES:
            continue
        table[str(path)] = end
        end += path.stat().st_size + 2  # no file has more lines than bytes
    return table, end


class Recorder(ast.NodeTransformer):
    """Puts before each statement one that records its line."""

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                setattr(node, field, [each for statement in value for each in self._recorded(statement)])
        return node

    def _recorded(self, statement: ast.stmt) -> list[ast.stmt]:
        is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if is_docstring or is_future:  # which have to come first
            return [statement]
        (record,) = ast.parse(f"{BYTES}[{self._offset + statement.lineno}] = 1").body
        for part in ast.walk(record):
            ast.copy_location(part, statement)
        return [record, statement]


def start(shared: Path) -> None:
    """Maps the shared file, and has the modules of dslc loaded with records from here on."""
    table, size = offsets()
    with shared.open("a+b") as file:
        file.truncate(size)
        setattr(builtins, BYTES, mmap.mmap(file.fileno(), size))
    plain = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, fullname: str) -> CodeType | None:
        if fullname.partition(".")[0] != "dslc":  # as most are, whose real paths take long to find
            return plain(self, fullname)
        path = os.path.realpath(self.get_filename(fullname))
        return compiled(path, table[path], shared) if path in table else plain(self, fullname)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]


def compiled(path: str, offset: int, shared: Path) -> CodeType:
    """Returns the code of a source file with records, from a cache beside the shared file."""
    name = f"{os.path.relpath(path, ROOT)}.{offset}.{os.stat(path).st_mtime_ns}".replace(os.sep, ".")
    cached = shared.parent / "code" / name
    with contextlib.suppress(FileNotFoundError):
        code: CodeType = marshal.loads(cached.read_bytes())
        return code
    tree = Recorder(offset).visit(ast.parse(Path(path).read_bytes(), path))
    code = compile(tree, path, "exec", dont_inherit=True)
    cached.parent.mkdir(exist_ok=True)
    partial = cached.with_name(f"{name}.{os.getpid()}")
    partial.write_bytes(marshal.dumps(code))
    partial.replace(cached)  # as other processes read it
    return code


if __name__ == "sitecustomize" and VARIABLE in os.environ:
    start(Path(os.environ[VARIABLE]))
