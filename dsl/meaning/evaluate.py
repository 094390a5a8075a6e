"""Evaluates expressions, directed by the kind that a field takes.

A name is a param if there is one, else a word or call that the field accepts. A param stands for its expression, which
is evaluated anew under the kind of each use; so it may hold a word, a call or a list as well as a number. A value that
cannot be computed is `BAD`: the mistake is in the report already, and nothing more is reported. Mistakes point at the
expression that holds the value, also inside a param, with the use in a note.

Limits: evaluation recurses with the nesting of the text, params included, to the bound `OPENED`. Params that stand for
more and more of one another are evaluated at each use, at most `VALUES` times in all.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeAlias, TypeVar

from dslc.dsl.bounds import OPENED, VALUES
from dslc.dsl.diagnostics import Note, Report, TooManyErrors
from dslc.dsl.language import registry, suggest, units
from dslc.dsl.language.suggest import write_instead
from dslc.dsl.meaning import arithmetic
from dslc.dsl.meaning.arithmetic import Amount, Impossible
from dslc.dsl.meaning.describe import describe, form, limits
from dslc.dsl.meaning.forms import (
    accepts,
    bare_words,
    fits,
    inside,
    numeric,
    rewrite,
    spelt,
    takes_text,
    with_unit,
    words_in,
)
from dslc.dsl.meaning.layering import Merged, Setting, names_in
from dslc.dsl.paths import ResolvedPath, is_path
from dslc.dsl.remedy import remedy, remove_at
from dslc.dsl.source import Span
from dslc.dsl.syntax import tree
from dslc.dsl.words import listed


def _change_of(count: int) -> str:
    """Returns the remedy for a list that needs `count` values more, or fewer."""
    return f"write {count:,} more" if count > 0 else f"leave out {-count:,} of them"


class BadValue:
    """A value that could not be computed."""


BAD: Final = BadValue()


N = TypeVar("N", int, float)
Calling: TypeAlias = "Callable[[Evaluator, tree.Expr, registry.CallOf, str, Mapping[str, Setting]], object]"


class Evaluator:
    """Evaluates the expressions of one job."""

    def __init__(self, merged: Merged, report: Report, call: Calling) -> None:
        """`call` makes calls (calling.py), and evaluates their arguments with this evaluator."""
        self.merged, self.report, self._call = merged, report, call
        self.params = merged.params
        self.trail: list[tuple[str, Span]] = []  # the params being evaluated, and where each was named
        self.paths: dict[Span, ResolvedPath] = {}  # texts that were taken as paths, by their place
        self.origins: dict[str, str] = {}
        self.broken: set[str] = set()
        self.depth = self.values = 0  # nesting depth inside one value; number of values so far
        self.circular = self._circles()

    # ------------------------------------------------------------------------------------------------- reporting

    def fail(
        self, code: str, message: str, span: Span, *, label: str = "", help: str = "", notes: Iterable[Note] = ()
    ) -> BadValue:
        # The value is in the first param's text, but the reader looks for its use.
        used = [Note(message=f"used here, as `{name}`", span=span) for name, span in self.trail[:1]]
        self.report.add(code, message, span, label=label, help=help, notes=[*notes, *used])
        return BAD

    def mismatch(self, expr: tree.Expr, kind: registry.Kind, path: str) -> BadValue:
        """Reports a value of another form than the field takes."""
        inner = inside(expr)
        if isinstance(inner, tree.Name) and not rewrite(inner, kind):
            return self.unknown_name(inner, kind, path)
        if isinstance(inner, tree.CallOf) and inner.name in self.params:
            return self.fail("E0121", f"`{inner.name}` is a param and cannot be called", inner.span)
        help = rewrite(inner, kind)
        if not help and isinstance(inner, tree.CallOf):
            help = suggest.meant_instead(suggest.for_word(inner.name, bare_words(kind)), inner.span)
        if not help and isinstance(kind, registry.CallOf):
            help = f"there is {listed(words_in(kind), 12)}"
        if not help and (says := suggest.meaning(path)):
            help = f"`{path}` means: {says}"
        if '"' in help and expr.span.source.name.startswith("<"):  # a shell removes quotes
            help = f"write `--set '{path}={help.split('`')[1]}'`"
        return self.fail("E0121", f"`{path}` takes {describe(kind)}, not {form(expr)}", expr.span, help=help)

    def unknown_name(self, name: tree.Name, kind: registry.Kind, path: str) -> BadValue:
        word = name.name
        if word in suggest.RESERVED:
            return self.fail("E0108", f"`{word}` is reserved for a later version of the language", name.span)
        literal = {"True": "true", "False": "false", "None": "none", "yes": "true", "no": "false", "on": "true",
                   "off": "false", "null": "none"}.get(word)  # fmt: skip
        if literal and (literal == "none" or accepts(kind, registry.Bool)):
            return self.fail("E0120", f"there is no `{word}`", name.span, help=write_instead(name.span, literal))
        words = words_in(kind)
        nearest = suggest.for_word(word, [*words, *self.params])
        description = describe(kind)
        has_all_words = all(f"`{each}`" in description or f"`{each}(" in description for each in words)
        wants = f"`{path}` takes {description if has_all_words else listed(words)}"
        if not nearest and takes_text(kind, word):
            return self.fail("E0120", f"`{word}` is neither a param nor text in quotes", name.span,
                             help=remedy(write_instead(name.span, f'"{word}"'), " if it is text"))  # fmt: skip
        return self.fail(
            "E0120", f"there is no `{word}` here", name.span, label=wants,
            help=suggest.meant_instead(nearest, name.span) or suggest.kind_meant(path, word),
        )  # fmt: skip

    # --------------------------------------------------------------------------------------------------- params

    def _circles(self) -> set[str]:
        """Finds the params that cannot be evaluated: params that depend on themselves, and params without a value."""
        done: set[str] = set()
        lost: set[str] = set()
        for name, param in self.params.items():
            # Depth first, without recursion: `chain` holds the params being visited, `left` the names in each.
            chain: dict[str, Span] = {}
            left: list[Iterator[tree.Name]] = [iter([tree.Name(span=param.declared, name=name)])]
            while left:
                reference = next(left[-1], None)
                if reference is None:
                    left.pop()
                    done.update(chain.popitem()[:1] if chain else ())
                elif reference.name in chain:
                    lost.update(self._circle(chain, reference))
                elif reference.name in self.params and reference.name not in done:
                    chain[reference.name] = reference.span
                    left.append(self._named_by(reference.name, lost))
        return lost

    def _named_by(self, param: str, lost: set[str]) -> Iterator[tree.Name]:
        setting = self.params[param].setting
        if setting is not None:
            return names_in(setting.value)
        lost.add(param)
        self.report.add(
            "E0129", f"param `{param}` has no value", self.params[param].declared,
            help=f"give it one: `--set {param}=…`",
        )  # fmt: skip
        return iter(())

    def _circle(self, chain: Mapping[str, Span], again: tree.Name) -> list[str]:
        """Reports that the last param of the chain names one before it; returns all from that one on."""
        circle = list(chain)[list(chain).index(again.name) :]
        places = [*((n, chain[n]) for n in circle[1:]), (again.name, again.span)]
        notes = [Note(message=f"`{n}` is needed here", span=span) for n, span in places]
        shown = " -> ".join(f"`{n}`" for n in [*circle, again.name])
        self.report.add("E0128", f"param `{again.name}` depends on itself: {shown}", chain[again.name], notes=notes)
        return circle

    @contextmanager
    def opened(self, name: tree.Name) -> Iterator[tree.Expr | None]:
        """Yields the expression that a param stands for; None if it has none that can be used."""
        if name.name in self.circular:
            yield None
            return
        setting = self.params[name.name].setting
        assert setting is not None
        self.trail.append((name.name, name.span))
        try:
            yield setting.value
        finally:
            self.trail.pop()

    def enter(self, expr: tree.Expr) -> bool:
        """Counts one more value, inside those being evaluated. Returns false, with the reason reported, if it is nested
        too deep; a caller that was admitted leaves by `depth -= 1`. Raises TooManyErrors if there are too many in all.
        """
        self.values += 1
        place = self.trail[0][1] if self.trail else expr.span
        if self.values > VALUES.most:
            message = f"the params of the job expand to more than {VALUES.most:,} values"
            help = "each use of a param counts with all the values in it: use fewer of them inside one another"
            self.report.add(VALUES.code, message, place, help=help)
            raise TooManyErrors
        if self.depth >= OPENED.most:
            message = f"this value is nested more than {OPENED.most} deep, in params that name params"
            self.report.add(OPENED.code, message, place, help="give some of them a plain value")
            return False
        self.depth += 1
        return True

    def behind(self, expr: tree.Expr) -> tree.Expr:
        """Returns the expression behind params and parentheses, to look at its form."""
        while True:
            if isinstance(expr, tree.Group):
                expr = expr.inner
            elif isinstance(expr, tree.Name) and expr.name in self.params and expr.name not in self.circular:
                setting = self.params[expr.name].setting
                assert setting is not None
                expr = setting.value
            else:
                return expr

    def is_lost(self, expr: tree.Expr) -> bool:
        """True if the value is missing for a reason that is reported already."""
        inner = self.behind(expr)
        return isinstance(inner, tree.UnreadValue) or (isinstance(inner, tree.Name) and inner.name in self.circular)

    # --------------------------------------------------------------------------------------------------- values

    def value(self, expr: tree.Expr, kind: registry.Kind, path: str) -> Any:
        """Returns the expression's value of this kind, or BAD."""
        if not self.enter(expr):
            return BAD
        try:
            return self._value(expr, kind, path)
        finally:
            self.depth -= 1

    def _value(self, expr: tree.Expr, kind: registry.Kind, path: str) -> Any:  # noqa: C901 - one case for each kind
        if isinstance(expr, tree.UnreadValue):
            return BAD
        if isinstance(expr, tree.Group):
            return self.value(expr.inner, kind, path)
        if isinstance(expr, tree.CallOf) and expr.name in bare_words(kind):
            return self.fail("E0121", f"`{expr.name}` is a word here, and takes no arguments", expr.span,
                             help=write_instead(expr.span, expr.name))  # fmt: skip
        if isinstance(expr, tree.Name) and expr.name in self.params:
            self._shadow(expr, kind)
            with self.opened(expr) as inner:
                return BAD if inner is None else self.value(inner, kind, path)
        match kind:
            case registry.Either():
                chosen = self.choose(expr, kind)
                return self.mismatch(expr, kind, path) if chosen is None else self._value(expr, chosen, path)
            case registry.Int():
                return self.integer(expr, kind, path)
            case registry.Float():
                return self.real(expr, kind, path)
            case registry.Measure():
                return self.measure(expr, kind, path)
            case registry.Bool():
                return expr.value if isinstance(expr, tree.Boolean) else self.mismatch(expr, kind, path)
            case registry.Path():
                return self.file(expr, kind, path)
            case registry.Str():
                return self.text(expr, kind, path)
            case registry.Word() | registry.Name():
                return self.word(expr, kind, path)
            case registry.IntRange():
                return self.range(expr, kind, path)
            case registry.ListOf():
                return self.list(expr, kind, path)
            case registry.CallOf():
                return self._call(self, expr, kind, path, {})
            case registry.AnyValue():
                return self.plain_value(expr, path)
            case _:
                raise AssertionError(kind)

    def choose(self, expr: tree.Expr, kind: registry.Either) -> registry.Kind | None:
        """Returns the first of the kinds that fits the form of the value."""
        inner = self.behind(expr)
        if isinstance(inner, tree.UnreadValue) or self.is_lost(inner):
            return kind.kinds[0]
        return next((k for k in kind.kinds if fits(inner, k)), None)

    def _shadow(self, name: tree.Name, kind: registry.Kind) -> None:
        if name.name in words_in(kind):
            param = self.params[name.name]
            self.report.add(
                "W0102", f"param `{name.name}` hides the word `{name.name}`", param.declared,
                notes=[Note(message="here the name means the param, not the word", span=name.span)],
                help="give the param another name",
            )  # fmt: skip

    # -------------------------------------------------------------------------------------------------- numbers

    def amount(self, expr: tree.Expr) -> Amount | BadValue:
        """Returns a number or a quantity; reports anything else."""
        if not self.enter(expr):
            return BAD
        try:
            return self._amount(expr)
        finally:
            self.depth -= 1

    def _amount(self, expr: tree.Expr) -> Amount | BadValue:
        match expr:
            case tree.Number():
                return self._computed(expr, lambda: arithmetic.finite(expr.value))
            case tree.NumberWithUnit():
                return self._quantity(expr)
            case tree.Group():
                return self.amount(expr.inner)
            case tree.Name() if expr.name in self.params:
                with self.opened(expr) as inner:
                    return BAD if inner is None else self.amount(inner)
            case tree.Name():
                return self.fail("E0120", f"there is no param `{expr.name}`", expr.span,
                                 help=suggest.did_you_mean(expr.name, self.params, expr.span))  # fmt: skip
            case tree.Unary():
                operand = self.amount(expr.operand)
                return operand if isinstance(operand, BadValue) else arithmetic.unary(expr.operator, operand)
            case tree.Binary():
                left, right = self.amount(expr.left), self.amount(expr.right)
                if isinstance(left, BadValue) or isinstance(right, BadValue):
                    return BAD
                return self._computed(expr, lambda: arithmetic.binary(expr.operator, left, right))
            case tree.UnreadValue():
                return BAD
            case _:
                return self.fail("E0127", f"a calculation takes numbers and quantities, not {form(expr)}", expr.span)

    def _computed(self, expr: tree.Expr, compute: Callable[[], Amount]) -> Amount | BadValue:
        try:
            return compute()
        except Impossible as why:
            return self.fail("E0127" if why.unlike else "E0126", why.reason, expr.span, help=why.help)

    def _quantity(self, expr: tree.NumberWithUnit) -> Amount | BadValue:
        try:
            arithmetic.finite(expr.value)
            quantity = units.in_base_units(expr.value, expr.unit)
            if quantity is not None:
                return arithmetic.finite(quantity)
        except (Impossible, OverflowError):
            return self.fail("E0126", "this number is too large", expr.span)
        same = next((unit for unit in units.UNITS if unit.lower() == expr.unit.lower()), None)
        meant = units.SPELT.get(expr.unit) or same or suggest.nearest_choice(expr.unit, units.UNITS)
        return self.fail(
            "E0123", f"there is no unit `{expr.unit}`", expr.unit_span,
            label="units are case-sensitive" if same else "",
            help=suggest.meant_instead(meant, expr.unit_span)
            or suggest.number_meant(expr.value, expr.unit, expr.span)
            or f"the units are {', '.join(units.UNITS)}",
        )  # fmt: skip

    def amount_for(self, expr: tree.Expr, kind: registry.Kind, path: str) -> Amount | BadValue:
        """Returns the number or quantity of a field that takes one."""
        return self.amount(expr) if numeric(expr) else self.mismatch(expr, kind, path)

    def number_for(self, expr: tree.Expr, kind: registry.Int | registry.Float, path: str) -> int | float | BadValue:
        """Returns the number of a field that takes one without a unit."""
        amount = self.amount_for(expr, kind, path)
        return self.wrong_dimension(expr, amount, kind, path) if isinstance(amount, registry.Quantity) else amount

    def integer(self, expr: tree.Expr, kind: registry.Int, path: str) -> int | BadValue:
        number = self.number_for(expr, kind, path)
        if isinstance(number, BadValue):
            return BAD
        if isinstance(number, float):
            if number != int(number) or not isinstance(inside(expr), tree.Binary):
                is_whole = number == int(number) and abs(number) < 2**63
                help = write_instead(expr.span, units.number(int(number))) if is_whole else ""
                message = f"`{path}` takes {describe(kind)}, not {units.number(number)}"
                return self.fail("E0121", message, expr.span, help=help)
            number = int(number)
            if abs(number) > units.LARGEST:
                return self.fail("E0126", "this number is too large", expr.span)
        if kind.choices and number not in kind.choices:
            return self.fail("E0125", f"`{path}` is {describe(kind)}, not {number}", expr.span)
        return self.within(expr, number, kind, units.number(number), path)

    def real(self, expr: tree.Expr, kind: registry.Float, path: str) -> float | BadValue:
        number = self.number_for(expr, kind, path)
        if isinstance(number, BadValue):
            return BAD
        return self.within(expr, float(number), kind, units.number(number), path)

    def measure(self, expr: tree.Expr, kind: registry.Measure, path: str) -> float | registry.Quantity | BadValue:
        amount = self.amount_for(expr, kind, path)
        if isinstance(amount, BadValue):
            return BAD
        first = kind.dimensions[0]
        bare = not isinstance(amount, registry.Quantity)
        if not isinstance(amount, registry.Quantity):
            if len(kind.dimensions) > 1 or first not in units.BARE:
                if amount == 0 and not kind.allows(0):
                    help = f"a number above 0 and its unit, such as `{units.EXAMPLES[first]}`"
                    return self.within(expr, amount, kind, "0", path, help)
                return self.fail(
                    "E0124", f"`{path}` needs a unit: {describe(kind)}", expr.span,
                    help=remedy("write ", with_unit(amount, kind, expr.span)),
                )  # fmt: skip
            amount = registry.Quantity(amount, first)
        if amount.dimension not in kind.dimensions:
            return self.wrong_dimension(expr, amount, kind, path)
        shown = units.number(amount.value) if bare else units.write(amount.value, amount.dimension)
        is_percent = bare and first == "ratio" and 1 < amount.value <= 100
        percent = write_instead(expr.span, f"{shown}%") if is_percent else ""
        number = self.within(expr, amount.value, kind, shown, path, percent)
        if isinstance(number, BadValue):
            return BAD
        whole = amount.dimension in ("bytes", "steps") or (amount.dimension == "epochs" and len(kind.dimensions) == 1)
        if not whole:
            # Epochs of a field that also takes steps may be fractional; they count exactly.
            number = number if amount.dimension == "epochs" and number == int(number) else float(number)
            number = int(number) if amount.dimension == "epochs" and number == int(number) else number
        elif number != int(number):
            return self.fail("E0121", f"`{path}` takes whole {units.NAMES[amount.dimension]}, not {shown}", expr.span)
        else:
            number = int(number)
        return number if len(kind.dimensions) == 1 else registry.Quantity(number, amount.dimension)

    def within(
        self, expr: tree.Expr, number: N, kind: registry.NumberKind, shown: str, path: str, help: str = ""
    ) -> N | BadValue:
        """Returns the number itself if it is within the limits."""
        if kind.allows(number):
            return number
        if not help and number < 0 and kind.allows(-number):
            help = suggest.meant_instead(shown.removeprefix("-"), expr.span)
        if number == 0 and suggest.can_be_none(path):
            help = remedy(remove_at(expr.span), " for none")
        if not help and (says := suggest.meaning(path)):
            help = f"`{path}` means: {says}"
        if not help and kind.min is not None and number < kind.min and isinstance(kind, registry.Int):
            help = remedy(write_instead(expr.span, units.number(kind.min)), ", the least")
        must = limits(kind).strip().removeprefix("of ")
        return self.fail("E0125", f"`{path}` is {shown}, and must be {must}", expr.span, help=help)

    def wrong_dimension(self, expr: tree.Expr, found: registry.Quantity, kind: registry.Kind, path: str) -> BadValue:
        shown = units.write(found.value, found.dimension)
        help = ""
        if isinstance(kind, registry.Int | registry.Float):
            help = write_instead(expr.span, units.number(found.value))
        return self.fail(
            "E0122", f"`{path}` takes {describe(kind)}, not {units.NAMES[found.dimension]}", expr.span,
            label=shown if shown.replace("_", "") != expr.span.text().replace("_", "") else "", help=help,
        )  # fmt: skip

    # ----------------------------------------------------------------------------------------------- other kinds

    def text(self, expr: tree.Expr, kind: registry.Str, path: str) -> str | BadValue:
        if not isinstance(expr, tree.Text):
            return self.mismatch(expr, kind, path)
        if kind.max_length is not None and len(expr.value) > kind.max_length:
            return self.fail("E0135", f"`{path}` takes at most {kind.max_length} characters", expr.span,
                             label=f"here are {len(expr.value):,}")  # fmt: skip
        if kind.pattern and not re.fullmatch(kind.pattern, expr.value):
            meant = suggest.function_meant(expr.value)
            help = suggest.meant_instead(f'"{meant}"', expr.span) if re.fullmatch(kind.pattern, meant) else ""
            return self.fail("E0135", f"`{path}` takes {describe(kind)}", expr.span, label="has another form",
                             help=help or suggest.kind_meant(path, expr.value))  # fmt: skip
        return expr.value

    def file(self, expr: tree.Expr, kind: registry.Path, path: str) -> str | BadValue:
        """Returns an absolute path: a file to read starts beside the file that names it, one to write in the cwd."""
        if not isinstance(expr, tree.Text):
            return self.mismatch(expr, kind, path)
        if not expr.value.strip() or "\0" in expr.value:
            return self.fail("E0135", f"`{path}` takes the path of a file or folder", expr.span, label="names nothing")
        if kind.name and not is_path(expr.value):
            return expr.value
        folder = self.merged.folders.get(id(expr.span.source), "") if kind.use == "read" else ""
        full = os.path.normpath(os.path.join(folder or os.getcwd(), os.path.expanduser(expr.value)))
        resolved = ResolvedPath(full, expr.value)
        self.paths[expr.span] = resolved
        return resolved

    def word(self, expr: tree.Expr, kind: registry.Word | registry.Name, path: str) -> str | BadValue:
        word = spelt(expr)
        if isinstance(kind, registry.Name):
            name = expr.value if isinstance(expr, tree.Text) else word
            return name if name else self.mismatch(expr, kind, path)
        if word in kind.choices:
            return word
        if isinstance(expr, tree.Text) and expr.value in kind.choices:
            message, help = f"`{path}` takes a word, without quotes", write_instead(expr.span, expr.value)
            return self.fail("E0121", message, expr.span, help=help)
        if isinstance(expr, tree.NumberWithUnit) and expr.joined and (nearest := suggest.for_word(word, kind.choices)):
            return self.fail("E0120", f"there is no `{word}` here", expr.span,
                             label=f"`{path}` takes {describe(kind)}",
                             help=suggest.meant_instead(nearest, expr.span))  # fmt: skip
        return self.mismatch(expr, kind, path)

    def range(self, expr: tree.Expr, kind: registry.IntRange, path: str) -> registry.Range | BadValue:
        if not isinstance(expr, tree.RangeOf):
            return self.mismatch(expr, kind, path)
        first = self.value(expr.first, registry.Int(min=kind.min), path)
        last = self.value(expr.last, registry.Int(min=kind.min), path)
        if isinstance(first, BadValue) or isinstance(last, BadValue):
            return BAD
        if first > last:
            help = write_instead(expr.span, f"{last}..{first}")
            return self.fail("E0137", f"the range {first}..{last} is empty", expr.span, help=help)
        return registry.Range(first, last)

    def list(self, expr: tree.Expr, kind: registry.ListOf, path: str) -> tuple[object, ...] | BadValue:
        if kind.single and fits(expr, kind.item):
            item = self.value(expr, kind.item, path)
            return BAD if isinstance(item, BadValue) else (item,)
        if not isinstance(expr, tree.List):
            return self.mismatch(expr, kind, path)
        count = len(expr.items)
        if kind.max_length is not None and count > kind.max_length:
            what = f"`{path}` takes at most {kind.max_length:,} values, not {count:,}"
            return self.fail("E0136", what, expr.span, help=_change_of(kind.max_length - count))
        items = [self.value(item, kind.item, f"{path}[{i}]") for i, item in enumerate(expr.items)]
        if kind.length is not None and count != kind.length:
            what = f"`{path}` takes {kind.length} values, not {count}"
            return self.fail("E0136", what, expr.span, help=_change_of(kind.length - count))
        if count < kind.min_length:
            shortfall = f"not {count:,}" if count else "and the list is empty"
            what = f"`{path}` takes at least {kind.min_length}, {shortfall}"
            return self.fail("E0136", what, expr.span, help=_change_of(kind.min_length - count))
        return BAD if any(isinstance(item, BadValue) for item in items) else tuple(items)

    def plain_value(self, expr: tree.Expr, path: str) -> object:
        """Returns a plain value, for a function of the user's."""
        kind = registry.AnyValue()
        match expr:
            case tree.Text() | tree.Boolean():
                return expr.value
            case tree.NoneLiteral():
                return None
            case tree.List():
                items = tuple(self.value(item, kind, f"{path}[{i}]") for i, item in enumerate(expr.items))
                return BAD if any(isinstance(item, BadValue) for item in items) else items
            case tree.Name() | tree.CallOf() | tree.RangeOf():
                return self.mismatch(expr, kind, path)
        amount = self.amount(expr)
        if isinstance(amount, registry.Quantity):
            return self.wrong_dimension(expr, amount, kind, path)
        return amount
