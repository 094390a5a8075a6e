"""The parse table of the grammar: made by lark, kept in the user's cache, loaded without lark.

Importing lark and building its parser costs more than half of what `dslc check` may take in all, and a parse table
depends on nothing but the grammar. So lark compiles `grammar/plt.lark` once to a LALR(1) table of plain numbers and
strings, which is kept as `<cache>/dslc/plt-….table`; `parser` runs it. A test holds our run of it against lark's own.

The cache is `$XDG_CACHE_HOME/dslc` or `~/.cache/dslc`, a folder of the user's own (made 0700; one that others may
write to is not used). An entry carries the grammar, lark's version and Python's, and a checksum: where any differs, or
the folder cannot be used, the table is built anew. Nothing here fails because of the cache.
"""

from __future__ import annotations

import functools
import marshal
import os
import sys
import zlib
from typing import Any, NamedTuple

import dslc.grammar

# Counts the layout of `Table`: a change of it must not meet an old file.
LAYOUT = 1


class Table(NamedTuple):
    """A LALR(1) parser as data.

    `terminals` are (name, regular expression) in the order in which they are tried. `rules` are (origin, callback,
    size): the callback is empty where a rule only hands on its one child. In `states`, an action is the next state to
    shift to, or `-1 - rule` to reduce by. `starts` and `ends` give the first and the accepting state of each start.
    """

    terminals: list[tuple[str, str]]
    rules: list[tuple[str, str, int]]
    states: list[dict[str, int]]
    starts: dict[str, int]
    ends: dict[str, int]


@functools.cache
def load() -> Table:
    """The table of the grammar, from the cache where it is there."""
    grammar = _read(os.path.join(next(iter(dslc.grammar.__path__)), "plt.lark")).decode()
    key = f"{LAYOUT} {_lark_version()} {sys.version} {grammar}"
    folder = _cache_folder()
    path = os.path.join(folder, f"plt-{zlib.crc32(key.encode()):08x}.table") if folder else ""
    if path and (kept := _kept(path, key)):
        return kept
    table = build(grammar)
    if path:
        _keep(path, key, table)
    return table


def build(grammar: str) -> Table:
    """The table as lark computes it."""
    from lark import Lark
    from lark.grammar import Rule
    from lark.lexer import TerminalDef

    lark = Lark(grammar, parser="lalr", lexer="basic", start=["start", "value", "path"])
    saved, memo = lark.memo_serialize([TerminalDef, Rule])
    parser = saved["parser"]["parser"]
    numbers: dict[int, int] = {}
    rules: list[tuple[str, str, int]] = []
    for number, entry in memo.items():
        if entry["__type__"] == "Rule":
            numbers[number] = len(rules)
            rules.append(_rule(entry))

    def action(kind: int, argument: Any) -> int:
        return argument if kind == 0 else -1 - numbers[argument["@"]]

    states = [
        {parser["tokens"][token]: action(*what) for token, what in parser["states"][state].items()}
        for state in range(len(parser["states"]))
    ]
    # Priorities decide, then what is longer: `**` before `*`. Regular expressions of one priority do not overlap.
    ordered = sorted(lark.terminals, key=lambda t: (-t.priority, -len(t.pattern.value), t.name))
    terminals = [(t.name, t.pattern.to_regexp()) for t in ordered]
    return Table(terminals, rules, states, dict(parser["start_states"]), dict(parser["end_states"]))


def _rule(entry: dict[str, Any]) -> tuple[str, str, int]:
    origin = str(entry["origin"]["name"])  # of lark 1.2 a token, which marshal does not take
    alias, size = entry["alias"], len(entry["expansion"])
    hands_on = entry["options"]["expand1"] and not alias
    assert not (hands_on and size != 1), f"the rule {origin} needs a name for what it makes"
    return origin, "" if hands_on else alias or origin, size


# ------------------------------------------------------------------------------------------------------- the cache


def _lark_version() -> str:
    """The version of lark, read from its first file: importing it, or `importlib.metadata`, would cost too much."""
    from importlib.util import find_spec

    spec = find_spec("lark")
    origin = spec.origin if spec else None
    lines = _read(origin).decode(errors="replace").splitlines() if origin else []
    return next((line for line in lines if line.startswith("__version__")), "unknown")


def _cache_folder() -> str | None:
    """The user's own folder for it, made where it is missing; None where there is none to be trusted."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):  # as the XDG base directory specification has it
        home = os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.path.join(home, "dslc")
    if not os.path.isabs(folder):
        return None
    try:
        os.makedirs(home, mode=0o700, exist_ok=True)
        if not os.path.lexists(folder):
            os.mkdir(folder, 0o700)
        stat = os.lstat(folder)
    except OSError:
        return None
    directory = (stat.st_mode & 0o170000) == 0o040000
    private = not hasattr(os, "getuid") or (stat.st_uid == os.getuid() and not stat.st_mode & 0o022)
    return folder if directory and private else None


def _kept(path: str, key: str) -> Table | None:
    try:
        data = _read(path)
    except OSError:
        return None
    # marshal trusts its input: only what we wrote whole, in a folder that only the user can write to, gets there.
    if len(data) < 4 or zlib.crc32(data[4:]) != int.from_bytes(data[:4], "little"):
        return None
    try:
        written_for, *parts = marshal.loads(data[4:])
    except (EOFError, TypeError, ValueError):
        return None
    return Table(*parts) if written_for == key else None


def _keep(path: str, key: str, table: Table) -> None:
    data = marshal.dumps((key, *table))
    part = f"{path}.{os.getpid()}"
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(zlib.crc32(data).to_bytes(4, "little") + data)
        os.replace(part, path)  # another process sees the old one or the new one, never half of one
    except OSError:
        pass


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
