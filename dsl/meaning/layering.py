"""Merges layers field by field: imports, the file and `--set`.

Each file is a layer, imports before the file that imports them; each `--set` is a layer of its own, so that the last of
several on one name wins. A value is replaced whole, except that `--set train.optimizer.lr=0.1` changes an argument of
the call in that field. Nothing is evaluated here. Only mistakes that concern the layers (repetitions, exclusive pairs,
the target of a setting) are reported here; resolve.py reports those in the values, and unknown blocks and fields.

A `Merged` holds the result. Sweeps stay apart until resolve.py tries their alternatives with `put`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from dslc.dsl.diagnostics import Note, Report
from dslc.dsl.language.registry import BLOCKS, PATH_BLOCKS
from dslc.dsl.language.suggest import RESERVED, did_you_mean, for_block, for_setting
from dslc.dsl.record import Record, record
from dslc.dsl.remedy import remedy, remove_at, set_field
from dslc.dsl.source import Span
from dslc.dsl.syntax import tree


@record
class Setting(Record):
    """One value, and its place. `arguments` are the arguments that later layers set in the value, a call."""

    name: Span
    value: tree.Expr
    arguments: Mapping[str, Setting] = field(default_factory=dict)


@record
class ParamSetting(Record):
    """A param; `setting` is None if it was declared without a value and given none."""

    name: str
    declared: Span
    setting: Setting | None
    default: tree.Expr | None


@dataclass(kw_only=True)
class Merged:
    """The result of all layers. Fields are keyed by block and field; `headers` has the last place of each block."""

    main: tree.Document
    folders: dict[int, str]  # by the id of a source: the base folder of its relative paths
    params: dict[str, ParamSetting] = field(default_factory=dict)
    fields: dict[tuple[str, str], Setting] = field(default_factory=dict)
    headers: dict[str, Span] = field(default_factory=dict)
    taken_for_fields: set[str] = field(default_factory=set)  # blocks that were given a value, as in `model = gpt2`
    promises: dict[str, list[tree.Comparison]] = field(default_factory=dict)
    sweeps: dict[tuple[str, ...], Setting] = field(default_factory=dict)
    spoken: set[str] = field(default_factory=set)  # every name in some value, overridden or not
    complete: bool = True  # false if a file could not be read to its end: fields that seem missing may be in the rest
    words: int = 0  # in all files

    def copy(self) -> Merged:
        """A copy that settings may be laid over."""
        return replace(
            self, params=dict(self.params), fields=dict(self.fields), headers=dict(self.headers),
            promises=dict(self.promises), sweeps=dict(self.sweeps), spoken=set(self.spoken),
            taken_for_fields=set(self.taken_for_fields),
        )  # fmt: skip


def merge(documents: list[tree.Document], main: tree.Document, folders: dict[int, str], report: Report) -> Merged:
    """Merges the files, in order of increasing precedence."""
    merged = Merged(main=main, folders=folders, words=sum(document.words for document in documents))
    for document in documents:
        _add(merged, document, report)
    return merged


# ------------------------------------------------------------------------------------------------------- one file


def _add(merged: Merged, document: tree.Document, report: Report) -> None:
    """Lays one file over the earlier ones."""
    seen: dict[tuple[str, ...], Span] = {}
    opened: set[str] = set()
    promises: dict[str, list[tree.Comparison]] = {}
    for statement in document.statements:
        match statement:
            case tree.Param():
                if statement.value is not None:
                    merged.spoken.update(name.name for name in names_in(statement.value))
                if not _repeated(("param", statement.name), statement.name_span, seen, report):
                    _declare(merged, statement)
            case tree.BlockValue():
                _apply_block_value(merged, statement, seen, report)
            case tree.Block():
                block = block_meant(statement.name, statement.name_span, report)
                if block not in opened:
                    opened.add(block)
                    merged.headers[block] = statement.name_span
                for entry in statement.entries:
                    merged.spoken.update(name.name for name in names_in(entry.value))
                    if isinstance(entry, tree.Comparison):
                        _promise(block, entry, promises, report)
                    else:
                        _entry(merged, block, entry, seen, report)
    merged.promises.update(promises)


def _declare(merged: Merged, param: tree.Param) -> None:
    before = merged.params.get(param.name)
    setting = Setting(name=param.name_span, value=param.value) if param.value is not None else None
    if setting is None and before is not None:
        setting = before.setting  # `param x` asks for a value; an import's will do
    default = param.value if param.value is not None or before is None else before.default
    merged.params[param.name] = ParamSetting(
        name=param.name, declared=param.name_span, setting=setting, default=default
    )


def _repeated(key: tuple[str, ...], name: Span, seen: dict[tuple[str, ...], Span], report: Report) -> bool:
    first = seen.setdefault(key, name)
    if first is name:
        return False
    shown = f"param `{key[1]}`" if key[0] == "param" else f"`{'.'.join(key)}`"
    report.add(
        "E0104", f"{shown} is set twice in one file", name,
        notes=[Note(message="first here", span=first)], help=remedy(remove_at(name, "keep one of the two")),
    )  # fmt: skip
    return True


def _apply_block_value(
    merged: Merged, whole: tree.BlockValue, seen: dict[tuple[str, ...], Span], report: Report
) -> None:
    """Applies `parallelism = auto`: a field that excludes all others of its block."""
    word = BLOCKS[whole.name].whole if whole.name in BLOCKS else ""
    if not word:
        if whole.name in BLOCKS or whole.name in PATH_BLOCKS:
            merged.taken_for_fields.add(whole.name)
            report.add(
                "E0113", f"`{whole.name}` is a block and takes no value of its own", whole.name_span,
                help=f"write its fields in braces: `{whole.name} {{ … }}`",
            )  # fmt: skip
        else:
            unknown_top(whole.name, whole.name_span, report)
        return
    if isinstance(whole.value, tree.NoneLiteral):
        merged.fields.pop((whole.name, word), None)
    elif not (isinstance(whole.value, tree.Name) and whole.value.name == word):
        report.add(
            "E0113", f"`{whole.name}` as a whole can only be `{word}`", whole.value.span,
            help=remedy("write ", set_field(whole.name, word), ", or its fields in braces"),
        )  # fmt: skip
    elif not _repeated((whole.name, word), whole.name_span, seen, report):
        merged.headers[whole.name] = whole.name_span
        _put_field(merged, whole.name, word, Setting(name=whole.name_span, value=whole.value), seen, report)


def unknown_top(name: str, span: Span, report: Report) -> None:
    if name in RESERVED:
        report.add("E0108", f"`{name}` is reserved for a later version of the language", span)
    else:
        report.add("E0106", f"there is no block `{name}`", span, help=for_block(name, span).said)


def block_meant(name: str, span: Span, report: Report) -> str:
    """Returns the block that a name stands for. A misspelt one is reported, and its entries are read all the same."""
    if name in BLOCKS or name in PATH_BLOCKS:
        return name
    unknown_top(name, span, report)
    meant = "" if name in RESERVED else for_block(name).path
    return meant if meant in BLOCKS or meant in PATH_BLOCKS else name


def _entry(merged: Merged, block: str, entry: tree.Entry, seen: dict[tuple[str, ...], Span], report: Report) -> None:
    setting = Setting(name=entry.name_span, value=entry.value)
    if block == "sweep":
        if not _repeated(("sweep", *entry.path), entry.name_span, seen, report):
            _put_sweep(merged, entry.path, setting)
    elif len(entry.path) != 1:
        report.add(
            "E0107", f"`{'.'.join(entry.path)}` is a path, and a field of `{block}` is a plain name", entry.name_span,
            help="paths are for `sweep` and `--set`",
        )  # fmt: skip
    elif block == "expect":
        _drop_promise(merged, entry, report)
    elif not _repeated((block, entry.path[0]), entry.name_span, seen, report):
        _put_field(merged, block, entry.path[0], setting, seen, report)


def _drop_promise(merged: Merged, entry: tree.Entry, report: Report) -> None:
    """Applies `bubble = none` in `expect`, which drops the promise of earlier layers; nothing else may be set there."""
    name = entry.path[0]
    if isinstance(entry.value, tree.NoneLiteral):
        merged.promises.pop(name, None)
        return
    report.add(
        "E0113", f"`expect` holds comparisons, and `{name} = …` is not one", entry.span,
        help=f"write `{name} == …`, or `<`, `<=`, `>=`, `>`",
    )  # fmt: skip


def _promise(block: str, entry: tree.Comparison, own: dict[str, list[tree.Comparison]], report: Report) -> None:
    if block != "expect":
        report.add(
            "E0113", f"a comparison belongs in `expect`, not in `{block}`", entry.span,
            help=f"write `{entry.name} = …` to set it, or move the line to `expect {{ … }}`",
        )  # fmt: skip
        return
    own.setdefault(entry.name, []).append(entry)


# ------------------------------------------------------------------------------------------------ single settings


def _put_field(
    merged: Merged, block: str, name: str, setting: Setting, seen: Mapping[tuple[str, ...], Span], report: Report
) -> None:
    """Sets a field. Of an exclusive pair, a later layer's removes an earlier's; within one layer it is a mistake."""
    if isinstance(setting.value, tree.NoneLiteral):
        # Kept, so that a required field that was removed is reported at the place that removed it.
        merged.fields[block, name] = setting
        return
    for partner in partners(merged, block, name):
        if (block, partner) in seen and seen[block, partner] is merged.fields[block, partner].name:
            whole = BLOCKS[block].whole in (name, partner)
            report.add(
                "E0105",
                f"`{block} = {BLOCKS[block].whole}` leaves the whole block to the compiler, and it has fields too"
                if whole
                else f"`{block}.{name}` and `{block}.{partner}` exclude each other",
                setting.name,
                notes=[Note(message=f"`{partner}` is set here", span=seen[block, partner])],
                help=remedy(remove_at(setting.name, "keep one of the two")),
            )
            return
        del merged.fields[block, partner]
    merged.fields[block, name] = setting


def partners(merged: Merged, block: str, name: str) -> list[str]:
    """Returns the fields now set that this one excludes."""
    declaration = BLOCKS.get(block)
    if declaration is None:
        return []
    names = [a if b == name else b for a, b in declaration.exclusive if name in (a, b)]
    if name == declaration.whole:
        names += [f for b, f in merged.fields if b == block and f != name]
    elif declaration.whole:
        names.append(declaration.whole)
    return [
        other
        for other in names
        if (block, other) in merged.fields and not isinstance(merged.fields[block, other].value, tree.NoneLiteral)
    ]


def _put_sweep(merged: Merged, path: tuple[str, ...], setting: Setting) -> None:
    merged.sweeps.pop(path, None)
    if not isinstance(setting.value, tree.NoneLiteral):
        merged.sweeps[path] = setting


def put(merged: Merged, path: tuple[str, ...], setting: Setting, report: Report) -> None:
    """Lays a `--set`, or one alternative of a sweep, over the merged values; reports why it does not fit."""
    if len(path) == 1:
        _put_alone(merged, path[0], setting, report)
    elif path[0] == "sweep":
        _put_sweep(merged, path[1:], setting)
    elif path[0] == "expect":
        if len(path) > 2 or not isinstance(setting.value, tree.NoneLiteral):
            report.add(
                "E0113", "`expect` holds comparisons", setting.name, help=f"write `expect.{path[1]}<…`, or `=none`"
            )
        else:
            merged.promises.pop(path[1], None)
    elif len(path) == 2:
        merged.headers.setdefault(path[0], setting.name)
        _put_field(merged, path[0], path[1], setting, {}, report)
    elif len(path) == 3:
        _put_argument(merged, (path[0], path[1], path[2]), setting)
    else:
        report.add(
            "E0110", f"`{'.'.join(path)}` has too many parts", setting.name,
            help="a path is a param, `block.field`, or `block.field.argument` of its call",
        )  # fmt: skip


def _put_alone(merged: Merged, name: str, setting: Setting, report: Report) -> None:
    """Sets a param, or a block as a whole."""
    if name in merged.params:
        merged.params[name] = replace(merged.params[name], setting=setting)
    elif name in BLOCKS:
        whole = tree.BlockValue(span=setting.name.to(setting.value.span), name=name, name_span=setting.name,
                           value=setting.value)  # fmt: skip
        _apply_block_value(merged, whole, {}, report)
    else:
        report.add(
            "E0110", f"there is no param `{name}`", setting.name,
            help=did_you_mean(name, merged.params, setting.name) or for_setting(name, setting.name)
            or "a setting names a param, `block.field` or `block.field.argument`",
        )  # fmt: skip


def _put_argument(merged: Merged, path: tuple[str, str, str], setting: Setting) -> None:
    block, name, argument = path
    # An argument of a call that no one wrote goes to the default call, which resolve.py knows.
    under = merged.fields.get((block, name)) or Setting(name=setting.name, value=tree.NoneLiteral(span=setting.name))
    merged.fields[block, name] = Setting(
        name=under.name, value=under.value, arguments={**under.arguments, argument: setting}
    )
    merged.headers.setdefault(block, setting.name)


# ------------------------------------------------------------------------------------------------------- the tree


def names_in(value: tree.Expr) -> Iterator[tree.Name]:
    """Yields every name in an expression that is used as a value."""
    match value:
        case tree.Name():
            yield value
        case tree.List():
            for item in value.items:
                yield from names_in(item)
        case tree.CallOf():
            for argument in value.arguments:
                yield from names_in(argument.value)
        case tree.RangeOf():
            yield from names_in(value.first)
            yield from names_in(value.last)
        case tree.Unary():
            yield from names_in(value.operand)
        case tree.Binary():
            yield from names_in(value.left)
            yield from names_in(value.right)
        case tree.Group():
            yield from names_in(value.inner)
