"""Text to tree: runs the grammar's parse table over the tokens, and goes on after a mistake.

    parse               a job file
    parse_expression    the text of one value
    parse_setting       `path = value`, as `--set` gives it

The table comes from lark (`grammar`), the words from `lexer`, brackets and units from `brackets`, the nodes from
`builder`, and what is said of a mistake from `explain`. Where the table has no action, the mistake is
explained, the unit it lies in (one entry or statement) is replaced by `name = <broken>`, or left out where it has no
name, and reading goes on with the next. Within one unit only the first cause is reported.

Limits: a syntax mistake costs the whole of its entry; a block header with a mistake costs the whole block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from dslc.dsl.bounds import NESTING, WORDS
from dslc.dsl.diagnostics import Report
from dslc.dsl.source import Source, Span
from dslc.dsl.syntax import tree
from dslc.dsl.syntax.brackets import Laid, Unit, lay_out
from dslc.dsl.syntax.builder import Builder, path_of
from dslc.dsl.syntax.explain import explain, other_format
from dslc.dsl.syntax.grammar import load
from dslc.dsl.syntax.lexer import UNREAD, lex
from dslc.dsl.syntax.mistakes import COMPARISONS, GaveUp, Mistakes, Place, Token


@dataclass(frozen=True, kw_only=True)
class Setting:
    """`train.optimizer.lr = 1e-3`.

    `value` is None where the text right of `=` is no expression; `mistakes` then says why. Where the target takes a
    string, that text is taken as it is: `text`, at `text_span`.
    """

    path: tuple[str, ...]
    path_span: Span
    value: tree.Expr | None
    text: str
    text_span: Span
    mistakes: Report


def parse(source: Source, report: Report, words: int = WORDS.most) -> tree.Document | None:
    """The tree of a job file, or None where the text is no job at all. Mistakes go into `report`.

    It may have so many `words`, signs and comments. After mistakes the document is what could be read: a value that
    could not is `tree.Broken`, and `complete` is false where something was left out.
    """
    mistakes = Mistakes(source, report)
    try:
        return _document(source, mistakes, words)
    except GaveUp:
        return None


def _document(source: Source, mistakes: Mistakes, words: int) -> tree.Document | None:
    if "\0" in source.text:
        at = source.text.index("\0")
        mistakes.add("E0001", "this is not a text file", at, at + 1, label="a zero byte stands here")
        return None
    lexed = lex(source, mistakes, words=words)
    if not any(token.kind != "_NL" for token in lexed.tokens):
        if not mistakes.offsets:
            what = "nothing but comments" if lexed.comments else "empty"
            mistakes.add("E0001", f"the file is {what}", 0, 0, help="`dslc new NAME` writes a job to start from")
        return None
    if other_format(lexed.tokens, mistakes):
        return None
    laid = lay_out(lexed.tokens, mistakes)
    run = _Run(laid, mistakes, "start")
    statements = run.to_end()
    if statements is None:
        return None
    return tree.Document(
        span=Span(source, 0, len(source.text)),
        source=source,
        statements=tuple(statements),
        comments=tuple(lexed.comments),
        complete=laid.complete and run.complete and run.builder.complete,
        words=len(lexed.tokens) + len(lexed.comments),
    )


def parse_expression(source: Source, report: Report, start: int = 0) -> tree.Expr | None:
    """The value that `source` holds from `start` on, or None where it is none; why goes into `report`."""
    mistakes = Mistakes(source, report, start)
    made = _one(source, mistakes, "value", start)
    return None if mistakes.offsets else made


def parse_setting(source: Source, report: Report) -> Setting | None:
    """One `--set`: its path, and the value right of the first `=`. None where the path is none; `report` says why."""
    text = source.text
    equals = text.find("=")
    mistakes = Mistakes(source, report)
    if equals < 0:
        name, _, meant = text.strip().partition(":")
        mistakes.add(
            "E0013",
            "`--set` takes `name=value`, and here is no `=`",
            0,
            len(text),
            help=f"write `{name.strip() or 'name'}={meant.strip() or '…'}`",
        )
        return None
    left = Source(source.name, text[:equals])
    if not left.text.strip():
        mistakes.add("E0021", "no name stands before this `=`", equals, equals + 1)
        return None
    path = _one(left, Mistakes(left, Report()), "path", 0)
    if path is None:
        start = len(left.text) - len(left.text.lstrip())
        shown = left.text.strip()
        mistakes.add(
            "E0021",
            f"`{shown}` names nothing that could be set",
            start,
            start + len(shown),
            help="write the name of a `param`, `block.field`, or `block.field.argument`",
        )
        return None
    right = text[equals + 1 :]
    text_start = equals + 1 + len(right) - len(right.lstrip())
    found = Report()
    names, span = path_of(path)
    value = parse_expression(source, found, equals + 1)
    return Setting(
        path=names,
        path_span=Span(source, span.start, span.end),
        value=value,
        text=right.strip(),
        text_span=Span(source, text_start, text_start + len(right.strip())),
        mistakes=found,
    )


def _one(source: Source, mistakes: Mistakes, start_rule: str, start: int) -> Any:
    """What one rule makes of a text in which no line end counts; None after a mistake."""
    try:
        laid = lay_out(lex(source, mistakes, start).tokens, mistakes, one_value=True)
        made = _Run(laid, mistakes, start_rule).to_end()
    except GaveUp:
        return None
    return None if mistakes.offsets else made


class _Made(NamedTuple):
    """A token or what a rule made, with its place and how deep it is nested."""

    what: Any
    start: int
    end: int
    depth: int


class _Run:
    """One run of the table over the tokens: a stack of states, and beside it what has been made."""

    def __init__(self, laid: Laid, mistakes: Mistakes, start_rule: str) -> None:
        self.table, self.laid, self.mistakes = load(), laid, mistakes
        self.start_rule = start_rule
        self.end_state = self.table.ends[start_rule]
        self.builder = Builder(mistakes)
        self.make = self.builder.rules({callback for _, callback, _ in self.table.rules})
        self.states = [self.table.starts[start_rule]]
        self.made: list[_Made] = []
        self.complete = True
        # Where the unit in hand began: the stacks to go back to.
        self.unit = -1
        self.back_to: tuple[list[int], list[_Made]] = ([], [])
        self.recovered: set[int] = set()
        self.tangled: set[int] = set()  # units that begin with a value: the next such one is more of the same

    def to_end(self) -> Any:
        """What the start rule makes, or None where the text could not be read to its end."""
        tokens, unit_of = self.laid.tokens, self.laid.unit_of
        at = 0
        while at < len(tokens):
            token = tokens[at]
            self.reduce(token)
            if token.kind == "$END" and self.states[-1] == self.end_state:
                return self.made[-1].what
            action = self.table.states[self.states[-1]].get(token.kind)
            if action is None:
                recovered = self.recover(at)
                if recovered is None:
                    return None
                at = recovered
                continue
            if unit_of[at] != self.unit:
                self.unit = unit_of[at]
                self.back_to = (self.states.copy(), self.made.copy())
            self.shift(token, action)
            at += 1
        return None

    def shift(self, token: Token, state: int) -> None:
        self.states.append(state)
        self.made.append(_Made(token, token.start, token.end, 0))

    def reduce(self, token: Token) -> None:
        """Applies every rule that is complete before `token`."""
        states = self.table.states
        while True:
            action = states[self.states[-1]].get(token.kind)
            if action is None or action >= 0 or (token.kind == "$END" and self.states[-1] == self.end_state):
                return
            origin, callback, size = self.table.rules[-1 - action]
            if callback:
                parts = self.made[len(self.made) - size :]
                del self.made[len(self.made) - size :]
                self.made.append(self.apply(origin, callback, parts, token))
            if size:
                del self.states[-size:]
            self.states.append(states[self.states[-1]][origin])

    def apply(self, origin: str, callback: str, parts: list[_Made], token: Token) -> _Made:
        start = parts[0].start if parts else token.start
        end = parts[-1].end if parts else token.start
        depth = max((part.depth for part in parts), default=0)
        if origin.startswith("_"):
            # The helper rules of lists: one growing list, spliced into what it belongs to.
            grown: list[Any] = parts[0].what if parts and isinstance(parts[0].what, list) else []
            for part in parts:
                if part.what is not grown:
                    grown.extend(part.what if isinstance(part.what, list) else [part.what])
            return _Made(grown, start, end, depth)
        children: list[Any] = []
        for part in parts:
            if isinstance(part.what, list):
                children.extend(part.what)
            else:
                children.append(part.what)
        span = self.mistakes.span(start, end)
        if depth >= NESTING.most and origin in ("value", "sum", "product", "unary", "power", "atom"):
            return _Made(self.builder.too_deep(span), start, end, 0)
        return _Made(self.make[callback](children, span), start, end, depth + 1)

    # ------------------------------------------------------------------------------------------ after a mistake

    def recover(self, at: int) -> int | None:
        """Explains why `tokens[at]` cannot follow, mends the stacks, and returns where to go on."""
        if at in self.recovered:
            return None
        self.recovered.add(at)
        number = self.laid.unit_of[at]
        unit, tokens = self.laid.units[number], self.laid.tokens
        if not self.mistakes.within(tokens[unit.start].start, tokens[unit.end].start) and not self.goes_on(at, number):
            explain(Place(self.mistakes, tokens, at, unit.start, unit.end, unit.in_body, self.start_rule != "start"))
        if self.start_rule != "start":
            return None
        if self.unit == number:
            self.states, self.made = self.back_to[0].copy(), self.back_to[1].copy()
        last = tokens[unit.end]
        if last.kind == "LBRACE":
            self.complete = False
            return self.after_block(unit.end)
        if self.feed(self.stand_in(unit)):
            self.unit = number
            return unit.end
        self.complete = False
        after = unit.end + (last.kind in ("_NL", "COMMA"))
        return after + (last.kind == "COMMA" and tokens[after].kind == "_NL")

    def goes_on(self, at: int, number: int) -> bool:
        """Whether what stands after a mistake and is no entry is taken for more of the same: because brackets went
        wrong before it, or because nothing begins like this."""
        units, tokens = self.laid.units, self.laid.tokens
        unit, previous = units[number], number - 1
        while previous > 0 and units[previous].start == units[previous].end:
            previous -= 1
        if previous < 0:
            return False
        start, end = tokens[units[previous].start].start, tokens[units[previous].end].start
        odd = at == unit.start and tokens[at].kind not in ("NAME", "STRING", "COMMA", "PARAM", "IMPORT")
        tangled = previous in self.tangled or self.mistakes.tangled(start, end)
        kinds = [token.kind for token in tokens[unit.start : unit.start + 2]]
        nameless = kinds[0] not in ("NAME", "STRING") or kinds == ["NAME", "LPAR"]
        begins = self.begins_entry(unit)
        if not begins and (tangled or nameless):
            self.tangled.add(number)
        return (tangled and not begins) or (odd and self.mistakes.within(start, end))

    def begins_entry(self, unit: Unit) -> bool:
        kinds = [token.kind for token in self.laid.tokens[unit.start : unit.end + 1]]
        while kinds[:2] == ["NAME", "DOT"]:
            del kinds[:2]
        return kinds[:1] in (["PARAM"], ["IMPORT"]) or (
            kinds[:1] == ["NAME"] and kinds[1] in ("EQUAL", "LBRACE", "FOREIGN", *COMPARISONS)
        )

    def after_block(self, brace: int) -> int:
        """Where the statement after the block begins whose `{` is at `brace`."""
        tokens = self.laid.tokens
        while tokens[brace].kind != "RBRACE":
            brace += 1
        return brace + 2 if tokens[brace + 1].kind == "_NL" else brace + 1

    def feed(self, stand_in: list[Token]) -> bool:
        """Takes the tokens of a stand-in, if there are any."""
        for token in stand_in:
            self.reduce(token)
            action = self.table.states[self.states[-1]].get(token.kind)
            if action is None or action < 0:
                self.states, self.made = self.back_to[0].copy(), self.back_to[1].copy()
                return False
            self.shift(token, action)
        return bool(stand_in)

    def stand_in(self, unit: Unit) -> list[Token]:
        """The entry or statement with its name kept and its value broken; nothing where it has no name."""
        tokens = self.laid.tokens[unit.start : unit.end]
        kinds = [token.kind for token in tokens]
        if not unit.in_body and kinds[:2] == ["IMPORT", "STRING"]:
            return tokens[:2]
        name_at = 1 if kinds[:1] == ["PARAM"] and not unit.in_body else 0
        if kinds[name_at : name_at + 1] != ["NAME"]:
            return []
        if not unit.in_body and name_at == 0 and kinds[1:2] not in (["EQUAL"], ["EQUALS"], ["FOREIGN"]):
            return []
        last = name_at + 1
        while unit.in_body and kinds[last : last + 2] == ["DOT", "NAME"]:
            last += 2
        sign = tokens[last : last + 1]
        where = tokens[last - 1].end
        compares = unit.in_body and last == 1 and sign and sign[0].kind in COMPARISONS
        equals = sign[0] if compares else Token("EQUAL", "=", where, where)
        return [*tokens[:last], equals, Token("NAME", UNREAD, where, tokens[-1].end)]
