"""Makes calls and blocks: puts named values into the dataclass that declares them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dslc.dsl.diagnostics import Note
from dslc.dsl.language.calls import Arguments
from dslc.dsl.language.registry import (
    AUTO,
    CALLS,
    AnyValue,
    Block,
    Bool,
    Call,
    CallOf,
    Either,
    Field,
    Node,
    Place,
    fields,
)
from dslc.dsl.language.suggest import RESERVED, for_argument, for_call, for_path, meant_instead, words_of
from dslc.dsl.meaning.describe import CATEGORIES, category, describe, form
from dslc.dsl.meaning.evaluate import BAD, BadValue, Evaluator
from dslc.dsl.meaning.layering import Setting
from dslc.dsl.remedy import remedy, remove_at, replace_text
from dslc.dsl.source import Span
from dslc.dsl.syntax import tree
from dslc.dsl.words import listed, plural

EXTRA = "arguments"  # the field of an open call that holds its further arguments


def call(ev: Evaluator, expr: tree.Expr, kind: CallOf, path: str, overrides: Mapping[str, Setting]) -> Call | BadValue:
    """Returns the call, with the arguments that later layers set in it."""
    written: Sequence[tree.Argument] = ()
    match expr:
        case tree.Name():
            name, name_span = expr.name, expr.span
        case tree.CallOf():
            name, name_span, written = expr.name, expr.name_span, expr.arguments
        case _:
            return ev.mismatch(expr, kind, path)
    declaration = next((CALLS[c][name] for c in kind.categories if name in CALLS[c]), None)
    if declaration is None:
        return unknown_call(ev, expr, name, name_span, kind, path)
    settings, extra, sound = _arguments(ev, declaration, written)
    sound = _override(ev, declaration, settings, extra, overrides) and sound
    node = build(ev, declaration, settings, path, expr.span, sound, extra)
    return node if isinstance(node, Call) else BAD


def unknown_call(ev: Evaluator, expr: tree.Expr, name: str, span: Span, kind: CallOf, path: str) -> BadValue:
    """Reports that no call of this name is of these categories."""
    if name in RESERVED:
        return ev.fail("E0108", f"`{name}` is reserved for a later version of the language", span)
    if name in ev.params:
        return ev.fail("E0121", f"`{name}` is a param and cannot be called", span)
    wanted = describe(kind)
    choices = [word for c in kind.categories for word in CALLS[c]]
    others = [c for c, calls in CALLS.items() if name in calls]
    if others:
        inside = "layer" in others and "network" in kind.categories
        other = "layer" if inside else others[0]
        return ev.fail(
            "E0130", f"`{name}` is {category(other)}, and `{path}` takes {wanted}", span,
            help=_layer_list(name, expr.span) if inside else f"there is {listed(choices, 12)}",
        )  # fmt: skip
    return ev.fail(
        "E0130", f"there is no {wanted.partition(' ')[2]} `{name}`", span,
        help=for_call(name, choices, span),
    )  # fmt: skip


def _layer_list(name: str, place: Span) -> str:
    return remedy("a network is a list of layers: ", replace_text(place, f"[{place.text()}]", f"`[{name}(…)]`"))


def _arguments(
    ev: Evaluator, declaration: type[Call], written: Sequence[tree.Argument]
) -> tuple[dict[str, Setting], dict[str, Setting], bool]:
    """Returns the arguments by field; further ones of an open call; and true if all of them were recognized."""
    declared = [f for f in fields(declaration) if not (declaration.open and f.name == EXTRA)]
    settings: dict[str, Setting] = {}
    extra: dict[str, Setting] = {}
    sound = True
    position = 0
    for argument in written:
        if argument.name is None:
            if position >= len(declared):
                sound = _too_many(ev, declaration, declared, argument)
                continue
            is_size = isinstance(argument.value, tree.Number) and argument.value.value > 1
            if position and is_size and isinstance(declared[position].kind, Bool):
                sound = _second_size(ev, declaration, declared, argument, written)
                continue
            name, name_span = declared[position].word, argument.span
            position += 1
        else:
            name, name_span = argument.name, argument.name_span or argument.span
        known = any(f.word == name for f in declared)
        if not known and not declaration.open:
            sound = _unknown_argument(ev, declaration, name, name_span)
            continue
        into = settings if known else extra
        if name in into:
            notes = [Note(message="first here", span=into[name].name)]
            ev.fail("E0133", f"`{declaration.word}` is given `{name}` twice", name_span, notes=notes)
            sound = False
            continue
        into[name] = Setting(name=name_span, value=argument.value)
    return settings, extra, sound


def _too_many(ev: Evaluator, declaration: type[Call], declared: list[Field], argument: tree.Argument) -> bool:
    count = len(declared)
    if declaration.open:
        message = f"further arguments of `{declaration.word}` must be given by name"
    elif count == 0:
        message = f"`{declaration.word}` takes no arguments"
    else:
        message = f"`{declaration.word}` takes {plural(count, 'argument')} at most"
    ev.fail("E0134", message, argument.span, help=f"they are {listed(f.word for f in declared)}" if count else "")
    return False


def _second_size(
    ev: Evaluator, declaration: type[Call], declared: list[Field], argument: tree.Argument,
    written: Sequence[tree.Argument],
) -> bool:  # fmt: skip
    """Reports `linear(64, 10)`, torch's form."""
    first = next(other for other in written if other.name is None)
    ev.fail(
        "E0134",
        f"`{declaration.word}` takes one size, `{declared[0].word}`: the size of its input is known",
        argument.span,
        help=remedy("write ", remove_at(first.span, f"`{declaration.word}({argument.span.text()})`")),
    )
    return False


def _unknown_argument(ev: Evaluator, declaration: type[Call], name: str, span: Span) -> bool:
    own = words_of(declaration)
    if name in RESERVED:
        ev.fail("E0108", f"`{name}` is reserved for a later version of the language", span)
        return False
    nearest = for_argument(name, own)
    having = [word for word, other in CALLS[declaration.category].items() if name in words_of(other)]
    if nearest:
        help = meant_instead(nearest, span)
    elif having:
        help = f"{listed(having)} has one; `{declaration.word}` has {listed(own) if own else 'none'}"
    else:
        help = for_path(name).said or f"it has {listed(own) if own else 'none'}"
    ev.fail("E0131", f"`{declaration.word}` has no argument `{name}`", span, help=help)
    return False


def _override(
    ev: Evaluator, declaration: type[Call], settings: dict[str, Setting], extra: dict[str, Setting],
    overrides: Mapping[str, Setting],
) -> bool:  # fmt: skip
    """Lays the arguments of `--set` over the written ones, and removes the arguments that these exclude."""
    own = words_of(declaration)
    sound = True
    for name, setting in overrides.items():
        if name in own:
            for a, b in declaration.exclusive:
                if name in (a, b) and not isinstance(setting.value, tree.NoneLiteral):
                    partner = a if name == b else b
                    if partner not in overrides:
                        settings.pop(partner, None)
            settings[name] = setting
        elif declaration.open:
            extra[name] = setting
        else:
            sound = _unknown_argument(ev, declaration, name, setting.name)
    return sound


def build(
    ev: Evaluator, declaration: type[Node], settings: Mapping[str, Setting], path: str, span: Span | None,
    sound: bool = True, extra: Mapping[str, Setting] | None = None,
) -> Node | BadValue:  # fmt: skip
    """Returns the block or call with its values, and the places of both; BAD if something required is missing or wrong.

    A wrong optional value counts as not given, and its path as broken, so that more of the job can be read.
    """
    values: dict[str, Any] = {}
    places: dict[str, Place] = {}
    complete = sound
    for field in fields(declaration):
        setting = settings.get(field.word)
        if extra is not None and field.name == EXTRA and issubclass(declaration, Call) and declaration.open:
            values[field.name] = _extra(ev, extra, path, places)
            continue
        if setting is None or is_none(ev, setting):
            if field.required:
                complete = False
                # If it was written under another name, that is the cause, and reported there.
                if (sound or setting is not None) and f"{path}.{field.word}" not in ev.broken:
                    missing(ev, declaration, field.word, setting.name if setting else span)
            continue
        if setting.arguments:
            value = with_arguments(ev, setting, field, f"{path}.{field.word}")
        else:
            value = ev.value(setting.value, field.kind, f"{path}.{field.word}")
        if isinstance(value, BadValue):
            ev.broken.add(f"{path}.{field.word}")
            complete = complete and not field.required
            continue
        places[field.name] = place(setting)
        if value == AUTO and issubclass(declaration, Block) and field.name in declaration.searched:
            values["auto_fields"] = (*values.get("auto_fields", ()), field.name)
        else:
            values[field.name] = value
        ev.origins[f"{path}.{field.word}"] = origin(setting.name)
    complete = _check_groups(ev, declaration, settings, values, path, span) and complete
    return declaration(**values, span=span, places=places) if complete else BAD


def _extra(ev: Evaluator, extra: Mapping[str, Setting], path: str, places: dict[str, Place]) -> Arguments:
    arguments = []
    for name, setting in extra.items():
        value = ev.value(setting.value, AnyValue(), f"{path}.{name}")
        if isinstance(value, BadValue):
            ev.broken.add(f"{path}.{name}")
            continue
        arguments.append((name, value))
        places.setdefault(name, place(setting))
        ev.origins[f"{path}.{name}"] = origin(setting.name)
    return tuple(arguments)


def _check_groups(
    ev: Evaluator, declaration: type[Node], settings: Mapping[str, Setting], values: Mapping[str, object], path: str,
    span: Span | None,
) -> bool:  # fmt: skip
    """True if one of each group is given, and no exclusive arguments; layering.py has checked this for fields."""
    sound = True
    if issubclass(declaration, Call):
        for a, b in declaration.exclusive:
            if values.get(a) is not None and values.get(b) is not None:
                first, second = sorted((settings[a], settings[b]), key=lambda s: s.name.start)
                ev.fail(
                    "E0105", f"`{a}` and `{b}` of `{declaration.word}` exclude each other", second.name,
                    notes=[Note(message="the other is here", span=first.name)],
                    help=remedy(remove_at(second.name, "keep one of the two")),
                )  # fmt: skip
                sound = False
    for group in declaration.one_of:
        lost = any(f"{path}.{name}" in ev.broken for name in group)
        if not lost and not any(values.get(name) is not None for name in group):
            missing(ev, declaration, "` or `".join(group), span)
        sound = sound and not lost and any(values.get(name) is not None for name in group)
    return sound


def missing(ev: Evaluator, declaration: type[Node], name: str, span: Span | None) -> None:
    """Reports that a required field or argument is missing."""
    if not ev.merged.complete and not issubclass(declaration, Call):
        return  # it may be in text that could not be read
    what = declaration.word
    if issubclass(declaration, Call):
        noun = CATEGORIES.get(declaration.category, declaration.category)
        message = f"{noun} `{what}` needs `{name}`"
    else:
        message = f"`{what}` needs `{name}`"
    field = next((f for f in fields(declaration) if f.word == name.partition("`")[0]), None)
    help = f"`{field.word}`: {field.doc}" if field else ""
    if span is None:
        span = end_of(ev)
    ev.fail("E0109", message, span, help=help)


def end_of(ev: Evaluator) -> Span:
    """Returns the end of the main file, where something missing could be added."""
    source = ev.merged.main.source
    end = len(source.text.rstrip())
    return Span(source, end, end)


def with_arguments(ev: Evaluator, setting: Setting, field: Field, path: str) -> object:
    """Returns a call in which later layers set arguments: `--set train.optimizer.lr=0.1`."""
    expr = ev.behind(setting.value)
    if isinstance(expr, tree.UnreadValue) or ev.is_lost(setting.value):
        return BAD
    first = next(iter(setting.arguments.values())).name
    kinds = _call_kinds(field)
    if not kinds:
        return ev.fail("E0111", f"`{path}` takes {describe(field.kind)}, which has no arguments", first)
    if isinstance(expr, tree.NoneLiteral):
        if not isinstance(field.default, Call):
            return ev.fail(
                "E0111", f"`{path}` is not set, so it has no argument to set", first,
                help=f"`{path}` takes {describe(field.kind)}",
            )  # fmt: skip
        # The default's call, as if it had been written here.
        expr = tree.Name(span=first, name=field.default.word)
    name = expr.name if isinstance(expr, tree.Name | tree.CallOf) else ""
    for kind in kinds:
        if isinstance(expr, tree.CallOf) or any(name in CALLS[c] for c in kind.categories):
            return call(ev, expr, kind, path, setting.arguments)
    if isinstance(ev.value(setting.value, field.kind, path), BadValue):
        return BAD
    return ev.fail(
        "E0111", f"`{path}` is {f'the word `{name}`' if name else form(expr)}, not a call with arguments", first,
        notes=[Note(message="it is set here", span=setting.value.span)],
    )  # fmt: skip


def _call_kinds(field: Field) -> list[CallOf]:
    kinds = field.kind.kinds if isinstance(field.kind, Either) else (field.kind,)
    return [kind for kind in kinds if isinstance(kind, CallOf)]


def is_none(ev: Evaluator, setting: Setting) -> bool:
    """True if the value is `none`, also through a param: it resets to the default."""
    return isinstance(ev.behind(setting.value), tree.NoneLiteral) and not setting.arguments


def place(setting: Setting) -> Place:
    return Place(setting.name, setting.value.span, setting.name.source.name)


def origin(span: Span) -> str:
    """Formats the origin of a value: `digits.plt:14`, or `<--set 1>`."""
    name = span.source.name
    return name if name.startswith("<") else f"{name}:{span.source.position(span.start)[0]}"
