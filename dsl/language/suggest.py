"""Suggests what a user may have meant: similar names, and the names that other tools give to the same things."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from typing import NamedTuple

from dslc.dsl.language.registry import BLOCKS, CALLS, PATH_BLOCKS, CallOf, Either, Kind, ListOf, Node, fields
from dslc.dsl.remedy import Edit, Fix, Help, remedy, replace_text, set_field
from dslc.dsl.source import Span
from dslc.dsl.words import listed

RESERVED = frozenset({"expert_tensor"})


class FrameworkAliases(NamedTuple):
    """The names of framework_aliases.toml. `fields` have the place here and the differences, `blocks` a block here, and
    `values`, by their spelling, the words and calls that may be meant; all others have the message.
    """

    blocks: dict[str, str]
    fields: dict[str, tuple[str, str]]
    absent: dict[str, str]
    values: dict[str, list[str]]
    absent_values: dict[str, str]
    commands: dict[str, str]
    options: dict[str, str]


@functools.cache
def aliases() -> FrameworkAliases:
    """Reads the file at the first mistake that needs it."""
    import tomllib

    with open(os.path.join(os.path.dirname(__file__), "framework_aliases.toml"), "rb") as file:
        rows: dict[str, list[list[str]]] = tomllib.load(file)
    values: dict[str, list[str]] = {}
    for word, names in rows.pop("values"):
        for name in names.split():
            values.setdefault(name, []).append(word)
    places = {name: (place, note) for place, note, names in rows.pop("fields") for name in names.split()}
    messages = {key: {name: text for text, names in pairs for name in names.split()} for key, pairs in rows.items()}
    return FrameworkAliases(fields=places, values=values, **messages)


def distance(one: str, other: str, limit: int = 4) -> int:
    """Returns the number of letters to insert, delete, change or swap with their neighbour; `limit` if more."""
    if abs(len(one) - len(other)) >= limit:
        return limit
    before: list[int] = []
    last = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        row = [i]
        for j, b in enumerate(other, 1):
            best = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and b == one[i - 2]:
                best = min(best, before[j - 2] + 1)
            row.append(best)
        if min(row) >= limit and min(last) >= limit:  # a swap adds to the row before the last
            return limit
        before, last = last, row
    return min(last[-1], limit)


def nearest_choice(word: str, choices: Iterable[str]) -> str | None:
    """Returns the choice that was probably meant, or None. Letters' case, `-` and `_` weigh little."""
    best: tuple[int, str] | None = None
    plain = word.lower().replace("-", "_")[:64]
    allowed = 1 if len(plain) <= 4 else 2 if len(plain) <= 8 else 3
    for choice in choices:
        away = distance(plain, choice.lower(), allowed + 1 if best is None else max(best[0], 1))
        if away > 0 and plain.replace("_", "") == choice.lower().replace("_", ""):
            away = 0
        if away <= allowed and away < len(plain) and (best is None or away < best[0]):
            best = away, choice
    return best[1] if best else None


def did_you_mean(word: str, choices: Iterable[str], place: Span | None = None) -> str:
    """Asks for the nearest choice, which replaces the word at its place; "" if none is near."""
    return meant_instead(nearest_choice(word, choices), place)


def meant_instead(word: str | None, place: Span | None) -> str:
    """Asks for a word, which replaces the text at a place; "" for None."""
    return remedy("did you mean ", replace_text(place, word), "?") if word else ""


def kind_meant(path: str, word: str) -> str:
    """Says where a kind of device goes, for a word in the field of their number; "" in another field."""
    if path != "devices.gpus" or not word.isidentifier():
        return ""
    return f"a kind of device has a field of its own: `devices {{ gpus = 8, kind = {word.lower()} }}`"


def number_meant(value: float, unit: str, place: Span | None) -> str:
    """Asks for what `10k` and `8xA100` mean: a number, and a device by its kind; "" for another unit."""
    if unit == "k":
        return remedy("a number has no unit: write ", replace_text(place, f"{round(value * 1000):_}"))
    count, kind = f"{value:g}", unit.removeprefix("x").lower()
    if kind and kind != unit.lower():
        return f"a kind of device has a field of its own: `devices {{ gpus = {count}, kind = {kind} }}`"
    return ""


def write_instead(place: Span | None, value: object) -> Help:
    return remedy("write ", replace_text(place, value))


def function_meant(text: str) -> str:
    """Rewrites `odd.tensor` and `odd.py:tensor` as `odd:tensor`, the form in which a job names a function."""
    module, _, function = text.rpartition(":" if ":" in text else ".")
    return f"{module.removesuffix('.py')}:{function}"


def can_be_none(path: str) -> bool:
    """True if a field of a block, such as `train.clip`, has no value when it is left out."""
    block, _, name = path.partition(".")
    declared = fields(BLOCKS[block]) if block in BLOCKS else ()
    return any(f.word == name and f.default is None and f.shown == "none" for f in declared)


def meaning(path: str) -> str:
    """Returns what a field of a block, such as `data.batch`, says; "" if it is no field of one."""
    block, _, name = path.partition(".")
    declared = fields(BLOCKS[block]) if block in BLOCKS else ()
    return next((f.doc for f in declared if f.word == name), "")


def categories(kind: Kind) -> tuple[str, ...]:
    """Returns the categories of calls that a value of this kind may be, or contain."""
    if isinstance(kind, CallOf):
        return kind.categories
    if isinstance(kind, Either):
        return tuple(category for inner in kind.kinds for category in categories(inner))
    return categories(kind.item) if isinstance(kind, ListOf) else ()


def words_of(declaration: type[Node]) -> list[str]:
    """Returns the names of a block's fields or a call's arguments that a user may write."""
    hidden = {getattr(declaration, "whole", "") or "arguments"}
    return [f.word for f in fields(declaration) if f.word not in hidden]


class NameSuggestion(NamedTuple):
    """Advice for an unknown name; `path` is the block or the field (`data.batch`) that is suggested, if one is."""

    said: str
    path: str = ""


class EntryPlace(NamedTuple):
    """Where an unknown name stands, the text of its value if it has one, and the fields that the job sets."""

    name: Span | None = None
    value: str = ""
    fields: frozenset[str] = frozenset()

    def moved(self, path: str, text: str, value: str = "") -> Fix | str:
        """Returns the fix that sets a field to this value, or to another one, instead of the entry here."""
        if self.name is None or not self.value:
            return text
        value = value or self.value
        return Fix((Edit("", None, self.name, ""), set_field(path, value)), text)


def for_block(name: str, at: Span | None = None) -> NameSuggestion:
    """Suggests a block for an unknown one, which stands there."""
    blocks = [*BLOCKS, *PATH_BLOCKS]
    place, note = aliases().fields.get(_plain(name), ("", ""))
    place = aliases().blocks.get(_plain(name), place)
    if place:
        return _place_suggestion(place, "" if place in BLOCKS else note, EntryPlace(at))
    nearest = nearest_choice(name, blocks)
    if nearest:
        return NameSuggestion(meant_instead(nearest, at), nearest)
    return _absent_or_in_another_block(name, f"the blocks are {listed(blocks)}", EntryPlace())


def for_field(block: str, name: str, at: EntryPlace = EntryPlace()) -> NameSuggestion:  # noqa: B008 - immutable
    """Suggests a field in place of a name that the block does not have."""
    own = words_of(BLOCKS[block])
    place, note = aliases().fields.get(_plain(name), ("", ""))
    if place:
        return _place_suggestion(place, note, at, block)
    meant = _argument(block, name, at)
    if meant.said:
        return meant
    nearest = nearest_choice(name, own) or next((word for word in own if word.endswith(f"_{name}")), None)
    if nearest:
        return NameSuggestion(meant_instead(nearest, at.name), f"{block}.{nearest}")
    return _absent_or_in_another_block(name, f"`{block}` has {listed(own)}", at)


def for_argument(name: str, own: list[str]) -> str | None:
    """Suggests an argument in place of a name that is not among the arguments `own` of a call."""
    meant = aliases().fields.get(_plain(name), ("", ""))[0].rpartition(".")[2]
    return meant if meant in own else nearest_choice(name, own)


def for_word(word: str, choices: Iterable[str]) -> str | None:
    """Suggests a word or call for a value that is none of the choices."""
    known = list(choices)
    return translated_choice(word, known) or nearest_choice(word, known)


def translated_choice(word: str, choices: Iterable[str]) -> str | None:
    """Returns the choice that others call `word`."""
    meant = aliases().values.get(_spelling(word), [])
    return next((choice for choice in choices if choice in meant), None)


def for_call(name: str, choices: list[str], place: Span | None = None) -> str:
    """Returns the advice for a call that is none of the choices, whose name stands at a place."""
    choice = for_word(name, choices)
    if choice:
        return meant_instead(choice, place)
    return aliases().absent_values.get(_spelling(name), f"there is {listed(choices, 12)}")


def _spelling(word: str) -> str:
    return "".join(char for char in word.lower() if char not in "_-. ")


def for_path(name: str, at: Span | None = None) -> NameSuggestion:
    """Suggests a path for one of a single name, which `--set` and `sweep` take for a param."""
    place, note = aliases().fields.get(_plain(name), ("", ""))
    if place:
        path = place.partition(" ")[0]
        return NameSuggestion(remedy("that is ", replace_text(at, path), f" here{f': {note}' if note else ''}"), path)
    block = next((block for block, declaration in BLOCKS.items() if name in words_of(declaration)), "")
    if block:
        return NameSuggestion(meant_instead(f"{block}.{name}", at), f"{block}.{name}")
    return NameSuggestion(aliases().absent.get(_plain(name), ""))


class Place(NamedTuple):
    """A place in a job: a block, a field or an argument of one, as `--set` takes them; the value, if the name was that
    of a value; and the differences.
    """

    path: str
    value: str = ""
    note: str = ""


def place_of(name: str) -> Place | None:
    """Returns the place in a job for `name`, a name here or elsewhere."""
    plain = _plain(name)
    place, note = aliases().fields.get(plain, ("", ""))
    if place:
        path, _, value = place.partition(" = ")
        return Place(path, value, note)
    for block, declaration in BLOCKS.items():
        if plain in words_of(declaration):
            return Place(f"{block}.{plain}")
    for block in ("train", "model", "data"):
        for field in fields(BLOCKS[block]):
            calls = [call for category in categories(field.kind) for call in CALLS[category].values()]
            if any(plain in words_of(call) for call in calls if call.category != "layer"):
                return Place(f"{block}.{field.word}.{plain}")
    return None


def for_setting(name: str, at: Span | None = None) -> str:
    """Returns the advice for a name taken for a param, in `--set` or `sweep`; "" if nothing is known."""
    advice = for_path(name, at).said
    place = None if advice else place_of(name)
    return meant_instead(place.path, at) if place else advice


def for_option(name: str) -> str:
    """Returns the advice for an unknown option of the command that corresponds to no field; "" if nothing is known."""
    return aliases().options.get(_plain(name)) or aliases().absent.get(_plain(name), "")


def for_command(name: str, choices: Iterable[str]) -> str:
    """Returns the advice for an unknown command."""
    known = list(choices)
    nearest = nearest_choice(name, known)
    advice = aliases().commands.get(_plain(name)) or (f"did you mean `dslc {nearest}`?" if nearest else "")
    return advice or f"the commands are {listed(known)}"


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _place_suggestion(place: str, note: str, at: EntryPlace, inside: str = "") -> NameSuggestion:
    """Returns the place of the table, as it is written; `inside` is the block that the reader is in."""
    path, _, value = place.partition(" = ")
    block, _, rest = path.partition(".")
    field, _, argument = rest.partition(".")
    after = f" ({note})" if note else ""
    if not field and block == inside:
        return NameSuggestion(f"`{block}` has {listed(words_of(BLOCKS[block]))}")
    if not field:
        header = replace_text(None if inside else at.name, block)
        return NameSuggestion(remedy("that is the block ", header, f" here{after}"), block)
    if argument:
        meant = _argument(block, argument, at, field)
        where = "" if block == inside else f"in `{block}`, "
        return NameSuggestion(remedy(where, meant.said, after), meant.path)
    if block == inside and value:
        said = remedy("write ", at.moved(path, f"`{field} = {value}`", value), after)
    elif block == inside:
        said = remedy(meant_instead(field, at.name), after)
    elif value:
        said = remedy("that is ", at.moved(path, f"`{block} {{ {field} = {value} }}`", value), f" here{after}")
    else:
        said = remedy(f"that is `{path}` here: ", at.moved(path, f"`{block} {{ {field} = … }}`"), after)
    return NameSuggestion(said, path)


# The example of each category.
_USUAL = frozenset({"adamw", "warmup_cosine", "text", "gpt", "cross_entropy", "slurm"})
_OWNERS = {"optimizer": "the optimizer", "source": "the source", "network": "the network", "layer": "the network"}


def _argument(block: str, name: str, at: EntryPlace, of: str = "") -> NameSuggestion:
    """Suggests an argument of a call in the block, or in its field `of`: `lr` in `train` is the optimizer's."""
    if (block, name) == ("model", "layers") and at.value.startswith("["):
        return NameSuggestion(
            remedy("a list of layers is written as ", at.moved("model.network", "`network`")), "model.network"
        )
    for field in fields(BLOCKS[block]):
        if of and field.word != of:
            continue
        known = [call for category in categories(field.kind) for call in CALLS[category].values()]
        having = [call for call in known if name in words_of(call)]
        usual = [call for call in having if call.word in _USUAL]
        # `warmup` is QAdam's too, but a user probably means the schedule's.
        if not having or (name == "warmup" and not usual):
            continue
        call = (usual or having)[0]
        shown = f"[{call.word}({name} = …)]" if call.category == "layer" else f"{call.word}({name} = …)"
        owner = _OWNERS.get(call.category, f"`{field.word}`")
        path = f"{block}.{field.word}"
        call_text = at.moved(f"{path}.{name}", f"`{field.word} = {shown}`")
        if path not in at.fields:  # the job leaves the call out
            call_text = at.moved(path, f"`{field.word} = {shown}`", shown.replace("…", at.value))
        return NameSuggestion(remedy(f"`{name}` is an argument of {owner}: ", call_text), path)
    return NameSuggestion("")


def _absent_or_in_another_block(name: str, choices: str, at: EntryPlace) -> NameSuggestion:
    """Says that nothing here corresponds to a name, or suggests a field of another block, else names the choices."""
    if _plain(name) in aliases().absent:
        return NameSuggestion(aliases().absent[_plain(name)])
    for block, declaration in BLOCKS.items():
        if name in words_of(declaration):
            there = at.moved(f"{block}.{name}", f"`{block} {{ {name} = … }}`")
            return NameSuggestion(remedy(f"`{name}` belongs to `{block}`: ", there), f"{block}.{name}")
    for block in ("train", "model", "data"):
        meant = _argument(block, name, at)
        if meant.said:
            return NameSuggestion(remedy(f"in `{block}`, ", meant.said), meant.path)
    if len(name) > 4:
        for block, declaration in BLOCKS.items():
            nearest = nearest_choice(name, [word for word in words_of(declaration) if len(word) > 4])
            if nearest:
                path = f"{block}.{nearest}"
                return NameSuggestion(remedy("did you mean ", at.moved(path, f"`{path}`"), "?"), path)
    return NameSuggestion(choices)
