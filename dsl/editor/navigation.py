"""Where a word is declared and used: params, imports, and the functions of `python("module:function")`.

Modules are found and read as text, and never imported.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder

from dslc.dsl.bounds import BYTES
from dslc.dsl.editor.scopes import TOP_WORDS, ScopedToken
from dslc.dsl.editor.snapshot import Snapshot
from dslc.dsl.files import read_bytes
from dslc.dsl.record import Record, record
from dslc.dsl.syntax.builder import unescaped

MAX_NEIGHBOURS = 200  # jobs of the folder that are read for a rename


class RenameError(ValueError):
    """A name that a param cannot have, or a place where nothing can be renamed."""


@record
class SourceRange(Record):
    """Characters `start` to `end` of the file at `path`, whose text is `text`."""

    path: str
    text: str
    start: int
    end: int


def find_declaration(snapshot: Snapshot, offset: int) -> list[SourceRange]:
    """Returns where the param, the imported file or the function at an offset is declared."""
    scoped = snapshot.token_at(offset)
    if scoped is None:
        return []
    token, role, scope = scoped
    if role == "string":
        value = unescaped(token.text)
        if scope.statement == "import":
            path = os.path.normpath(os.path.join(snapshot.folder, os.path.expanduser(value)))
            return [SourceRange(path=path, text="", start=0, end=0)] if os.path.isfile(path) else []
        calls = [bracket.name for bracket in scope.brackets[-1:]]
        return list(_function(value, snapshot.folder)) if calls == ["python"] else []
    name = _param_name(scoped, snapshot)
    files = [snapshot, *_imported(snapshot)]
    return [place for file in files for place, declares in _uses(file, name) if declares] if name else []


def find_uses(snapshot: Snapshot, offset: int, neighbours: Iterable[Snapshot] = ()) -> list[SourceRange]:
    """Returns every place where the param at an offset is declared or used: in the file, in the files that it imports,
    and in the files of `neighbours` that import it.
    """
    scoped = snapshot.token_at(offset)
    name = _param_name(scoped, snapshot) if scoped else ""
    if not name:
        return []
    files = {file.path: file for file in [*neighbours, *_imported(snapshot), snapshot]}
    return [place for file in files.values() for place, _ in _uses(file, name)]


def rename(snapshot: Snapshot, offset: int, name: str, neighbours: Iterable[Snapshot] = ()) -> list[SourceRange]:
    """Returns the places that take the new name of the param at an offset. Raises RenameError."""
    places = find_uses(snapshot, offset, neighbours)
    if not places:
        raise RenameError("only params can be renamed")
    if not (name.isascii() and name.isidentifier()) or name in ("param", "import", "true", "false", "none"):
        raise RenameError(f"`{name}` is no name of a param: letters, digits and `_`, and no word of the language")
    if name in snapshot.params:
        raise RenameError(f"there is a param `{name}` already")
    return places


def find_neighbours(snapshot: Snapshot, open_jobs: Iterable[Snapshot] = ()) -> list[Snapshot]:
    """Returns the jobs of the same folder that import this one, in the text that the editor has of them."""
    by_path = {os.path.abspath(job.path): job for job in open_jobs}
    here = os.path.abspath(snapshot.path)
    found = []
    names = sorted(name for name in os.listdir(snapshot.folder) if name.endswith(".plt")) if os.path.isdir(
        snapshot.folder) else []  # fmt: skip
    for name in names[:MAX_NEIGHBOURS]:
        path = os.path.join(snapshot.folder, name)
        text = _read_text(path) if path != here and path not in by_path else ""
        job = by_path.get(path) or (Snapshot(text, path) if text and "import" in text else None)
        if job is not None and here in job.loaded.files and path != here:
            found.append(job)
    return found


def _param_name(scoped: ScopedToken, snapshot: Snapshot) -> str:
    """Returns the param that a token declares or uses; "" if it is none."""
    token, role, scope = scoped
    uses = role == "param" or (role == "name" and token.text in snapshot.params)
    sweeps = role == "field" and scope.block == "sweep" and not scope.path and token.text in snapshot.params
    return token.text if uses or (sweeps and token.text not in TOP_WORDS) else ""


def _uses(file: Snapshot, name: str) -> Iterator[tuple[SourceRange, bool]]:
    """Yields each place of a param in one file, and whether it declares the param."""
    for token, role, scope in file.tokens:
        swept = role == "field" and scope.block == "sweep" and not scope.path and name not in TOP_WORDS
        if token.text == name and (role in ("param", "name") or swept):
            yield SourceRange(path=file.path, text=file.text, start=token.start, end=token.end), role == "param"


def _imported(snapshot: Snapshot) -> list[Snapshot]:
    """Returns the files that a job imports."""
    here = os.path.abspath(snapshot.path)
    texts = ((path, _read_text(path)) for path in snapshot.loaded.files if path != here)
    return [Snapshot(text, path) for path, text in texts if text]


def _read_text(path: str) -> str:
    """Returns the text of a file; "" if it cannot be read as text."""
    try:
        return read_bytes(path, BYTES.most).decode("utf-8")
    except (OSError, UnicodeDecodeError, ValueError):
        return ""


def _function(value: str, folder: str) -> Iterator[SourceRange]:
    """Yields the definition of `module:function`, `pkg.module:Class` or `../lib/module:function`."""
    inside, _, named = value.rpartition("/")
    module, _, name = named.partition(":")
    path = _module_file(module, os.path.join(folder, os.path.expanduser(inside)))
    text = _read_text(path) if path else ""
    if not path or not text:
        return
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError):
        yield SourceRange(path=path, text=text, start=0, end=0)
        return
    starts = [0, *(at + 1 for at, char in enumerate(text) if char == "\n")]
    for node in body:
        names = [target.id for target in node.targets if isinstance(target, ast.Name)] if isinstance(
            node, ast.Assign) else [getattr(node, "name", "")]  # fmt: skip
        if name.partition(".")[0] in names:
            at = text.find(name.partition(".")[0], starts[node.lineno - 1])
            yield SourceRange(path=path, text=text, start=at, end=at + len(name.partition(".")[0]))
            return
    yield SourceRange(path=path, text=text, start=0, end=0)


def _module_file(module: str, folder: str) -> str:
    """Returns the file of a module: beside the job, or where Python would find it. Imports no parent package."""
    places: list[str] | None = [folder, *sys.path]
    spec = None
    for part in module.split("."):
        spec = PathFinder.find_spec(part, places) if part.isidentifier() and places is not None else None
        if spec is None:
            return ""
        places = list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else None
    return spec.origin if spec is not None and spec.origin is not None and spec.origin.endswith(".py") else ""
