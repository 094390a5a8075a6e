"""Remedies: what a diagnostic advises, as text for a reader and as edits that a program can make.

A rule writes its help in parts, and each part that changes the job is an `Edit` or a `Fix`:

    remedy(set_field("parallelism.data", 4), ", or ", remove_field("parallelism.data", "leave it out"))

is the text "`data = 4`, or leave it out" with two fixes. dsl/editor/edits.py makes a fix in the text of a job.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dslc.dsl.record import Record, positional
from dslc.dsl.source import Span


@positional
class Edit(Record):
    """One change of a job's text. `text` is how the help calls it.

    - `path` and `value` set a param, a block, a field or an argument of its call, as `--set` does.
    - `path` alone removes it.
    - With a `place`, the path is an argument of the call there.
    - `place` and `value` replace the text there; with an empty `value` they delete it.
    - `place` alone removes the entry, the argument, the item or the statement there.
    """

    path: str
    value: str | None
    place: Span | None
    text: str

    @property
    def title(self) -> str:
        """Returns the change in words, on its own: "set `parallelism.data` to `4`"."""
        old = " ".join(self.place.text().split()) if self.place else ""
        if self.path:
            return f"set `{self.path}` to `{self.value}`" if self.value is not None else f"remove `{self.path}`"
        if self.value:
            return f"replace `{old}` by `{self.value}`" if old else f"insert `{self.value.strip()}`"
        return f"remove `{old}`"


@positional
class Fix(Record):
    """Edits that belong together: one way to correct a mistake. `text` is how the help calls it."""

    edits: tuple[Edit, ...]
    text: str

    @property
    def title(self) -> str:
        return " and ".join(edit.title for edit in self.edits)


class Help(str):
    """The text of a help, and the fixes that it names."""

    fixes: tuple[Fix, ...] = ()


def remedy(*parts: str | Edit | Fix) -> Help:
    """Returns a help made of these parts, in order. The parts of a `Help` keep their fixes."""
    texts: list[str] = []
    fixes: list[Fix] = []
    for part in parts:
        if isinstance(part, Edit):
            part = Fix((part,), part.text)
        if isinstance(part, Fix):
            texts.append(part.text)
            fixes += [part] if part.edits else []
        else:
            texts.append(part)
            fixes.extend(fixes_of(part))
    text = Help("".join(texts))
    text.fixes = tuple(fixes)
    return text


def fixes_of(text: str) -> tuple[Fix, ...]:
    """Returns the fixes that a help names; none for plain text."""
    return text.fixes if isinstance(text, Help) else ()


def join_remedies(separator: str, remedies: Sequence[str]) -> Help:
    """Joins helps as `str.join` does, and keeps their fixes."""
    parts = [part for text in remedies for part in (separator, text)]
    return remedy(*parts[1:])


def either_field(path: str, values: Iterable[object], text: str = "") -> Help:
    """Advises one of several values of a field: "`a = 1`, `a = 2` or `a = 4`". `text` is a format of each."""
    edits = [set_field(path, value, text.format(value)) for value in values]
    parts: list[str | Edit] = []
    for number, edit in enumerate(edits):
        parts += [edit] if number == 0 else [" or " if number == len(edits) - 1 else ", ", edit]
    return remedy(*parts)


def either_argument(call: Span | None, name: str, values: Iterable[object], separator: str) -> Help:
    """Advises one of several values of an argument, each as it is: "1, 2, 4"."""
    return join_remedies(separator, [remedy(set_argument(call, name, value, f"{value}")) for value in values])


def join_edits(*parts: str | Edit) -> Fix:
    """Returns one fix of several edits, with the words between them."""
    edits = tuple(part for part in parts if isinstance(part, Edit))
    return Fix(edits, "".join(part.text if isinstance(part, Edit) else part for part in parts))


def set_field(path: str, value: object, text: str = "") -> Edit:
    """Sets a param, a block, a field or an argument of its call."""
    return Edit(path, str(value), None, text or f"`{path.rpartition('.')[2]} = {value}`")


def remove_field(path: str, text: str = "") -> Edit:
    return Edit(path, None, None, text or f"leave `{path.rpartition('.')[2]}` out")


def set_argument(call: Span | None, name: str, value: object, text: str = "") -> Edit | str:
    """Sets an argument of the call at a place; plain text for a call that no file has."""
    text = text or f"`{name} = {value}`"
    return Edit(name, str(value), call, text) if call is not None else text


def remove_argument(call: Span | None, name: str, text: str = "") -> Edit | str:
    text = text or f"leave `{name}` out"
    return Edit(name, None, call, text) if call is not None else text


def replace_text(place: Span | None, value: object, text: str = "") -> Edit | str:
    """Replaces the text at a place; plain text for a value that no file has."""
    text = text or f"`{value}`"
    return Edit("", str(value), place, text) if place is not None else text


def remove_at(place: Span | None, text: str = "leave it out") -> Edit | str:
    """Removes the entry, the argument, the item or the statement at a place."""
    return Edit("", None, place, text) if place is not None else text
