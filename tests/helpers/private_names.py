"""Finds torch's private names in the tracer and the runtime: `PYTHONPATH=tests python -m helpers.private_names`.

Counted are imports of private modules and names of torch, attributes that begin with an underscore, also as text for
`getattr` and the like, and methods of torch's that a class calls on itself. Not counted are our own private names, and
those of Python and of other libraries.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from dslc.compiler.trace.private_torch import OVERRIDDEN
from helpers.paths import ROOT

HOME = "compiler/trace/private_torch.py"
FOLDERS = ("runtime", "compiler/trace")
OF_OTHERS = {"_replace", "_fields", "_current_frames", "_exit", "_getframe", "_urandom"} | {
    "_init_weights", "_model_mapping", "_name_or_path", "_no_split_modules", "_tp_plan",  # of transformers
    "_is_stateful", "_supports_attention_backend", "_apply_gate",  # of transformers
    "_disable_adapters",  # of peft
    "_fingerprint",  # of datasets
    "_data", "_scale",  # of a float8 tensor of torchao
}  # fmt: skip
READERS = {"getattr", "hasattr", "setattr", "delattr"}


def private_names() -> list[str]:
    """Returns `path:line: name` of each use outside the one file."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    others = [path for path in files if path.relative_to(ROOT).as_posix() != HOME]
    return [f"{path.relative_to(ROOT)}:{line}: {name}" for path in others for line, name in _private_uses(path)]


def _private_uses(path: Path) -> Iterator[tuple[int, str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    allowed = _defined_names(tree) | OF_OTHERS | {name for names in OVERRIDDEN.values() for name in names}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, each.name) for each in names if _of_torch(each.name))
            case ast.ImportFrom(module=str(module), names=names):
                full = [f"{module}.{each.name}" for each in names]
                yield from ((node.lineno, each) for each in full if _of_torch(each))
            case ast.Attribute(attr=name) if _is_private(name) and name not in allowed:
                yield node.lineno, ast.unparse(node)
            case ast.Call(func=ast.Name(id=reader), args=[_, ast.Constant(value=str(name)), *_]) if reader in READERS:
                if _is_private(name) and name not in allowed:
                    yield node.lineno, ast.unparse(node)


def _defined_names(tree: ast.AST) -> set[str]:
    """Returns the private names that a file defines itself."""
    names = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    attributes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    names |= {n.target.id for n in ast.walk(tree) if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    return names | {n.attr for n in attributes if ast.unparse(n.value) in ("self", "cls")}


def _of_torch(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "torch" and any(map(_is_private, parts))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


if __name__ == "__main__":
    found = private_names()
    print("\n".join(found))
    print(f"{len(found)} uses in {len({each.partition(':')[0] for each in found})} files outside {HOME}")
