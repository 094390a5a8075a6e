"""Declares a block, or a call such as `adamw(lr = 3e-4)`, once, as a dataclass.

The fields carry kind, default and one sentence of documentation. Checking, `--set`, formatting, completion, the
reference page and the JSON schema all read these declarations; `dsl/meaning` interprets them. Declarations use the
user's words and never name a backend. They are in blocks.py, layers.py (the parts of networks), optimizers.py (which
names classes of `torch.optim` too), and calls.py. The last has losses, sources and all other calls.

A `Kind` describes the values that a field takes, and their types in Python:

    Int, Float, Bool, Str, Path, Word   int, float, bool, str, str, str
    Measure("bytes")                    one dimension: a plain number in base units (bytes, seconds, steps, epochs,
                                        a ratio as a fraction, bytes per second, FLOP/s)
    Measure("steps", "epochs")          several dimensions: a `Quantity`
    IntRange (`1..4`)                   a `Range`
    ListOf(k)                           a tuple
    CallOf("optimizer")                 an instance of the dataclass that declares the call
    Either(k1, k2)                      the first kind that fits the form of the value
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, TypeVar, dataclass_transform

from dslc.dsl.record import Record, positional, record
from dslc.dsl.source import Span

Dimension = Literal["bytes", "time", "steps", "epochs", "ratio", "bandwidth", "flops"]
T = TypeVar("T")
AUTO = "auto"  # the value of a field that is left to the compiler


# ---------------------------------------------------------------------------------------------------- values


@positional
class Quantity(Record):
    """A number with its dimension, in base units: bytes, seconds, steps, epochs, a fraction, bytes/s, FLOP/s."""

    value: int | float
    dimension: Dimension


@positional
class Range(Record):
    """`first..last`, both included."""

    first: int
    last: int


@positional
class Place(Record):
    """The place of an entry: its name, its value, and the layer that set it (a file, `<--set 2>`)."""

    name: Span
    value: Span
    origin: str = ""


# ----------------------------------------------------------------------------------------------------- kinds


@positional
class Kind(Record):
    """The values that a field takes."""


@positional
class NumberKind(Kind):
    """Numbers within limits; `above` and `below` are exclusive."""

    min: float | None = None
    max: float | None = None
    above: float | None = None
    below: float | None = None

    def allows(self, number: float) -> bool:
        """True if the number is within the limits."""
        return (
            (self.min is None or number >= self.min)
            and (self.max is None or number <= self.max)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
        )


@positional
class Int(NumberKind):
    choices: tuple[int, ...] = ()


@positional
class Float(NumberKind):
    pass


@positional
class Bool(Kind):
    pass


@positional
class Str(Kind):
    """Text in quotes, of `max_length` characters. `pattern` is a regular expression for it, `hint` says it in words."""

    pattern: str = ""
    hint: str = ""
    max_length: int | None = None


@positional
class Path(Kind):
    """Text in quotes naming a file, made absolute: a file that is read is relative to the file that names it, a file
    that is written to the current folder. `glob` allows `*`. With `name`, it may be a name too: a path then begins with
    `./`, `../`, `/` or `~`.
    """

    use: Literal["read", "write"] = "read"
    glob: bool = False
    name: bool = False


@positional
class Word(Kind):
    """One of some bare words. `1f1b` is a word too."""

    choices: tuple[str, ...]


@positional
class Name(Kind):
    """A bare word that is looked up later, or text, such as the kind of a device."""


@positional
class Measure(NumberKind):
    """A quantity of one of these dimensions. If there is only one (steps, epochs, ratio), a bare number will do."""

    dimensions: tuple[Dimension, ...] = ()


@positional
class IntRange(Kind):
    """A range of whole numbers `1..4`."""

    min: int = 1


@positional
class ListOf(Kind):
    """A list; with `single`, one item may stand without its brackets."""

    item: Kind
    min_length: int = 0
    length: int | None = None
    max_length: int | None = None
    single: bool = False


@positional
class CallOf(Kind):
    """A call of the named categories; `f` means `f()`."""

    categories: tuple[str, ...]


@positional
class Either(Kind):
    """`words` replaces a long list in messages."""

    kinds: tuple[Kind, ...]
    words: str = ""


@positional
class AnyValue(Kind):
    """Any plain value: number, text, boolean, none, list. For arguments of a user's own function."""


def word(*choices: str) -> Word:
    return Word(choices)


def measure(*dimensions: Dimension, **limits: float) -> Measure:
    return Measure(dimensions=dimensions, **limits)


def calls(*categories: str) -> CallOf:
    return CallOf(categories)


def auto_or(kind: Kind) -> Either | Word:
    """Returns the kind of a field whose value may be left to the compiler."""
    if isinstance(kind, Word):
        return word(*kind.choices, AUTO)
    return either(*(kind.kinds if isinstance(kind, Either) else (kind,)), word(AUTO))


def either(*kinds: Kind, words: str = "") -> Either:
    return Either(kinds, words)


# ---------------------------------------------------------------------------------------------- declarations

REQUIRED: Any = dataclasses.MISSING


def arg(kind: Kind, doc: str, *, default: Any = REQUIRED, shown: str = "") -> Any:
    """Declares a field of a block or an argument of a call.

    `doc` is one sentence. `shown` is the default's text in the reference if it is not the value itself ("the model's").
    A default of None means "not given"; `field = none` resets to the default.
    """
    metadata = {"kind": kind, "doc": doc, "shown": shown}
    if default is REQUIRED:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@record
class Node(Record):
    """Base of every resolved block and call, with its place. Equality is by value, not by place."""

    word: ClassVar[str]
    doc: ClassVar[str]
    exclusive: ClassVar[tuple[tuple[str, str], ...]] = ()  # pairs of which one alone may be given
    one_of: ClassVar[tuple[tuple[str, ...], ...]] = ()  # groups of which one must be given
    span: Span | None = dataclasses.field(default=None, compare=False, repr=False)
    places: Mapping[str, Place] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def value_span(self, name: str) -> Span | None:
        """Returns the span of the value of `name` if the user wrote one, else of the block's header or the call."""
        place = self.places.get(name)
        return place.value if place else self.span

    def name_span(self, name: str) -> Span | None:
        """Returns the span of the entry's name if the user wrote one, else of the block's header or the call."""
        place = self.places.get(name)
        return place.name if place else self.span

    def is_set(self, name: str) -> bool:
        return name in self.places


@record
class Block(Node):
    """`whole` is the word that sets the block as a whole (`parallelism = auto`), and the field that it makes true.

    `searched` are fields that may be `auto`, which leaves them to the compiler. `auto_fields` are the fields that are:
    they have their defaults.
    """

    whole: ClassVar[str] = ""
    searched: ClassVar[tuple[str, ...]] = ()
    auto_fields: tuple[str, ...] = ()

    def is_auto(self, name: str) -> bool:
        """True if the field is left to the compiler, alone or with its whole block."""
        return name in self.auto_fields or (name in self.searched and bool(self.whole and getattr(self, self.whole)))


@record
class Call(Node):
    category: ClassVar[str]
    open: ClassVar[bool] = False  # takes further arguments of any name, kept in `arguments`


BLOCKS: dict[str, type[Block]] = {}
PATH_BLOCKS = ("expect", "sweep")  # blocks whose entries name fields of others
CALLS: dict[str, dict[str, type[Call]]] = {}


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(arg,))
def block(cls: type[T]) -> type[T]:
    """Declares a block; its word is the class's name without `Spec`, in lower case, its doc the class's docstring."""
    declared: Any = record(cls)
    declared.word = cls.__name__.removesuffix("Spec").lower()
    declared.doc = " ".join((cls.__doc__ or "").split())
    BLOCKS[declared.word] = declared
    return cls


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(arg,))
def call(category: str, word: str = "", *, open: bool = False) -> Callable[[type[T]], type[T]]:
    """Declares a call of a category; its word is the class's name in snake case unless given."""

    def declare(cls: type[T]) -> type[T]:
        declared: Any = record(cls)
        declared.word = word or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
        declared.doc = " ".join((cls.__doc__ or "").split())
        declared.category, declared.open = category, open
        CALLS.setdefault(category, {})[declared.word] = declared
        return cls

    return declare


@positional
class Field(Record):
    """One declared field, as the interpreters of the registry read it."""

    name: str
    kind: Kind
    doc: str
    default: Any
    shown: str

    @property
    def word(self) -> str:
        """The user's name for it: `with` is `with_` in Python."""
        return self.name.removesuffix("_")

    @property
    def required(self) -> bool:
        return self.default is REQUIRED


_FIELDS: dict[type[Node], tuple[Field, ...]] = {}  # filled on demand


def fields(declaration: type[Node]) -> tuple[Field, ...]:
    """Returns the declared fields in order; a call's positional arguments follow this order."""
    declared = _FIELDS.get(declaration)
    if declared is None:
        declared = _FIELDS[declaration] = tuple(
            Field(f.name, f.metadata["kind"], f.metadata["doc"], f.default, f.metadata["shown"])
            for f in dataclasses.fields(declaration)
            if "kind" in f.metadata
        )
    return declared
