"""The outline of a job, and the parts of it that fold."""

from __future__ import annotations

from typing import Literal

from dslc.dsl.editor.scopes import Scope
from dslc.dsl.editor.snapshot import Snapshot
from dslc.dsl.record import Record, record
from dslc.dsl.syntax.mistakes import OPENERS, PAIRS

MAX_DETAIL = 60  # characters of a value


@record
class Symbol(Record):
    """A statement or an entry: characters `start` to `end`, with its name at `name_start` to `name_end`."""

    name: str
    kind: Literal["block", "field", "param", "import"]
    detail: str
    start: int
    end: int
    name_start: int
    name_end: int
    children: tuple[Symbol, ...] = ()


@record
class Fold(Record):
    """Characters `start` to `end`, on several lines, that fold into the first."""

    start: int
    end: int
    kind: Literal["region", "comment", "imports"] = "region"


def symbols(snapshot: Snapshot) -> list[Symbol]:
    """Returns the statements in order, blocks with their entries, also a broken block's."""
    entries = _entries(snapshot)
    found = []
    for region in snapshot.regions:
        word, _, rest = region.name.partition(" ")
        name = rest.strip('"') if word in ("param", "import") and rest else region.name
        if not name:
            continue
        at = region.text.find(name, len(word) if rest else 0)
        start = region.start + max(0, at)
        inner = tuple(entry for entry in entries if region.start <= entry.start < region.end)
        kind: Literal["block", "param", "import"] = "param" if word == "param" else "import" if word == "import" else (
            "block")  # fmt: skip
        detail = "" if inner or kind == "import" else _detail(region.text.partition("=")[2])
        found.append(
            Symbol(
                name=name, kind=kind, detail=detail, start=region.start, end=region.end, name_start=start,
                name_end=start + (len(name) if at >= 0 else 0), children=inner,
            )
        )  # fmt: skip
    return found


def _entries(snapshot: Snapshot) -> list[Symbol]:
    found: list[Symbol] = []
    name: tuple[int, int] | None = None
    value: list[int] = []

    def close() -> None:
        nonlocal name
        if name is not None:
            end = value[-1] if value else name[1]
            text = snapshot.text[name[1] : end].strip()
            found.append(
                Symbol(
                    name=snapshot.text[name[0] : name[1]], kind="field", detail=_detail(text.removeprefix("=")),
                    start=name[0], end=end, name_start=name[0], name_end=name[1],
                )
            )  # fmt: skip
        name = None
        value.clear()

    previous = ""
    for token, role, scope in snapshot.tokens:
        if (
            token.kind in ("RBRACE", "LBRACE")
            or (token.kind in ("_NL", "COMMA") and not scope.brackets)
            or scope == Scope()
        ):
            close()
        elif role == "field" and not scope.path:
            close()
            name = (token.start, token.end)
        elif name is not None and role == "field" and previous == "DOT" and not value:
            name = (name[0], token.end)
        elif name is not None and token.kind != "_NL" and (scope.in_value or token.kind != "DOT"):
            value.append(token.end)
        previous = token.kind
    close()
    return found


def _detail(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_DETAIL else f"{line[: MAX_DETAIL - 1]}…"


def folds(snapshot: Snapshot) -> list[Fold]:
    """Returns blocks, brackets, runs of comments and runs of imports that cover several lines."""
    found: list[Fold] = []
    opened: list[int] = []
    for token, _, _ in snapshot.tokens:
        if token.kind in PAIRS:
            opened.append(token.start)
        elif token.kind in OPENERS and opened:
            found.append(Fold(start=opened.pop(), end=token.start))
    comments = [(c.span.start, c.span.end) for c in snapshot.comments if c.own_line]
    imports = [(r.start, r.end) for r in snapshot.regions if r.name.startswith("import ")]
    found += [Fold(start=start, end=end, kind="comment") for start, end in _runs(comments, snapshot.text)]
    found += [Fold(start=start, end=end, kind="imports") for start, end in _runs(imports, snapshot.text)]
    return [fold for fold in found if "\n" in snapshot.text[fold.start : fold.end]]


def _runs(spans: list[tuple[int, int]], text: str) -> list[tuple[int, int]]:
    """Joins spans with only one line end between them."""
    runs: list[tuple[int, int]] = []
    for start, end in spans:
        if runs and text[runs[-1][1] : start].strip(" \t\r") == "\n":
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((start, end))
    return runs
