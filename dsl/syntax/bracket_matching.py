"""Matches brackets and splits tokens into units: the line ends that count, and the bounds of each entry.

After `lay_out`, brackets match, line ends are only left where they end something, and every token belongs to a
`TokenRange`: one entry or statement with its terminator (a line end, a comma between entries, a brace). So whatever
mistake the parser finds afterwards lies inside one unit, and the next unit can be read as if nothing had happened.

A bracket that is never closed is reported at its opener; the end of its value is guessed from the lines that follow,
and the text in between is skipped. A block inside a block is reported and left out. If an entry begins on the line of
another, the missing comma is inserted, so that both are read.
"""

from __future__ import annotations

from typing import NamedTuple

from dslc.dsl.diagnostics import Note
from dslc.dsl.remedy import remedy
from dslc.dsl.syntax.lexer import UNREAD
from dslc.dsl.syntax.mistakes import COMPARISONS, ENDS_VALUE, OPENERS, PAIRS, Mistakes, ParseAbortedError, Token

# Tokens that may end a line whose value continues.
GOES_ON = frozenset({"COMMA", "EQUAL", "PLUS", "MINUS", "STAR", "SLASH", "DOUBLE_SLASH", "RANGE", "_NL", *PAIRS})


class TokenRange(NamedTuple):
    """Tokens `start` to `end`; the last token ends the range."""

    start: int
    end: int
    in_body: bool


class BracketLayout(NamedTuple):
    """`unit_of` gives each token's index in `units`; `complete` is false if something was left out."""

    tokens: list[Token]
    units: list[TokenRange]
    unit_of: list[int]
    complete: bool


class Open(NamedTuple):
    """An opener that is not closed yet: the token, its index among the tokens kept and among those read."""

    token: Token
    kept: int
    read: int


def lay_out(read: list[Token], mistakes: Mistakes, *, one_value: bool = False) -> BracketLayout:
    """Matches brackets and finds the units. `one_value`: one expression, in which line ends do not count."""
    layout = _BracketMatcher(read, mistakes, one_value)
    layout.run()
    units, unit_of = _units(layout.kept)
    return BracketLayout(layout.kept, units, unit_of, layout.complete)


def _units(tokens: list[Token]) -> tuple[list[TokenRange], list[int]]:
    units: list[TokenRange] = []
    unit_of: list[int] = []
    start, depth, in_body = 0, 0, False
    for index, token in enumerate(tokens):
        unit_of.append(len(units))
        depth += (token.kind in ("LPAR", "LSQB")) - (token.kind in ("RPAR", "RSQB"))
        comma = token.kind == "COMMA" and in_body and depth == 0
        if comma or token.kind in ("_NL", "LBRACE", "RBRACE", "$END"):
            units.append(TokenRange(start, index, in_body))
            start, in_body = index + 1, in_body if comma or token.kind == "_NL" else token.kind == "LBRACE"
    return units, unit_of


class _BracketMatcher:
    def __init__(self, read: list[Token], mistakes: Mistakes, one_value: bool) -> None:
        self.read, self.mistakes, self.one_value = read, mistakes, one_value
        self.kept: list[Token] = []
        self.open: list[Open] = []
        self.complete = True
        self.closed_at = mistakes.start  # the end of the last block
        self.looked = 0  # how many of the kept tokens were searched for the name of a stray `}`
        self.ended_early = False  # a `}` came before a bracket was closed
        self.end = read[-1].end if read else mistakes.start

    def run(self) -> None:
        at = 0
        while True:
            while at < len(self.read):
                at = self.step(at)
            brackets = [entry for entry in self.open if entry.token.kind != "LBRACE"]
            if not brackets:
                break
            at = self.unclosed(brackets, at, None)
        if self.open:
            self.unclosed_brace(None)
        if not self.one_value and self.kept and self.kept[-1].kind != "_NL":
            self.kept.append(Token("_NL", "", self.end, self.end))
        self.kept.append(Token("$END", "", self.end, self.end))

    def step(self, at: int) -> int:
        token = self.read[at]
        if token.kind == "_NL":
            self.line_end(token)
        elif token.kind == "LBRACE":
            return self.brace(at)
        elif token.kind in OPENERS:
            return self.closer(at)
        else:
            if token.kind in PAIRS:
                self.open.append(Open(token, len(self.kept), at))
            elif token.kind == "NAME" and self.sets(at) and self.ends_entry():
                self.missing_comma(token)
            self.kept.append(token)
        return at + 1

    def ends_entry(self) -> bool:
        """True if the kept tokens end with a whole entry of a block, `name = value`."""
        if not self.open or self.open[-1].token.kind != "LBRACE" or self.kept[-1].kind not in ENDS_VALUE:
            return False
        depth = 0
        for token in reversed(self.kept):
            depth += (token.kind in ("RPAR", "RSQB")) - (token.kind in ("LPAR", "LSQB"))
            if depth == 0 and token.kind in ("_NL", "COMMA", "LBRACE"):
                return False
            if depth == 0 and (token.kind == "EQUAL" or token.kind in COMPARISONS):
                return True
        return False

    def sets(self, at: int) -> bool:
        """True if a name or path is there with a sign after it, as at the beginning of an entry."""
        kinds = [token.kind for token in self.read[at + 1 : at + 8]]
        while kinds[:2] == ["DOT", "NAME"]:
            del kinds[:2]
        return bool(kinds) and (kinds[0] == "EQUAL" or kinds[0] in COMPARISONS)

    def missing_comma(self, token: Token) -> None:
        before = self.kept[-1]
        text = self.mistakes.source.text
        line = text.rfind("\n", 0, before.end) + 1
        if not self.mistakes.within(line, before.end):
            self.mistakes.add(
                "E0017",
                f"two entries on one line: `{token.text}` begins the next",
                (before.end, before.end),
                help=remedy(
                    self.mistakes.replacement(before.end, before.end, ",", "write a comma between them"),
                    ", or begin a new line",
                ),
            )
        self.kept.append(Token("COMMA", ",", before.end, before.end))

    def line_end(self, token: Token) -> None:
        inside = self.open and self.open[-1].token.kind != "LBRACE"
        if not (self.one_value or inside or not self.kept or self.kept[-1].kind == "_NL"):
            self.kept.append(token)

    def source_text(self, token: Token) -> str:
        return self.mistakes.source.text[token.start : token.end]

    # ------------------------------------------------------------------------------------------------- closers

    def closer(self, at: int) -> int:
        token = self.read[at]
        wanted = OPENERS[token.kind]
        if self.open and self.open[-1].token.kind == wanted:
            self.open.pop()
            self.kept.append(token)
            self.closed_at = token.end if wanted == "LBRACE" else self.closed_at
            return at + 1
        depth = max((i for i, entry in enumerate(self.open) if entry.token.kind == wanted), default=-1)
        top = self.open[-1].token if self.open else None
        if top and top.kind != "LBRACE" and wanted != "LBRACE":
            stray = depth < 0 and self.fits_after(at + 1, self.open)
            if not stray and (depth < 0 or self.fits_after(at + 1, self.open[:-1])):
                self.wrong_closer(top, token)
                return at + 1
        if depth >= 0:
            return self.unclosed(self.open[depth + 1 :], at, token)
        if wanted == "LBRACE" and not self.open and self.missing_brace(token):
            return at + 1
        if self.is_consequence(token):
            self.complete = False
            return at + 1
        message = f"nothing is open that this `{token.text}` could close"
        removal = self.mistakes.replacement(token.start, token.end, "", "remove it")
        help = remedy(removal, f", or write the `{_sign(wanted)}` it belongs to")
        self.mistakes.add("E0011", message, token, help=help)
        return at + 1

    def is_consequence(self, closer: Token) -> bool:
        """True if a closer with nothing to close follows from an earlier mistake in its block or on its line."""
        if closer.kind == "RBRACE" and self.ended_early:
            self.ended_early = False
            return True
        line = self.mistakes.source.text.rfind("\n", 0, closer.start) + 1
        return self.mistakes.tangled(min(self.closed_at, line), closer.start)

    def missing_brace(self, closer: Token) -> bool:
        """True if a brace closes a block that a name alone on its line was meant to open; opens the block there."""
        # Tokens that an earlier closer searched in vain are not searched again.
        first = min(self.looked, max(0, len(self.kept) - 1))
        last = max((i for i in range(first, len(self.kept)) if self.kept[i].kind == "RBRACE"), default=first - 1)
        at = next((i for i in range(last + 1, len(self.kept)) if self.is_lone_name(i)), None)
        if at is None or self.kept[at].text == UNREAD:
            self.looked = max(first, len(self.kept) - 1)
            return False
        name = self.kept[at]
        self.mistakes.add(
            "E0019",
            f"`{{` is missing after `{name.text}`",
            (name.end, name.end),
            help=remedy("write ", self.mistakes.replacement(name.end, name.end, " {", f"`{name.text} {{`")),
            notes=[Note(message="the block is closed here", span=self.mistakes.span(closer.start, closer.end))],
        )
        self.kept.insert(at + 1, Token("LBRACE", "{", name.end, name.end))
        self.kept.append(closer)
        return True

    def is_lone_name(self, at: int) -> bool:
        """True if a name is alone on its line, or after the end of a block."""
        if self.kept[at].kind != "NAME":
            return False
        before = self.kept[at - 1].kind if at else "_NL"
        after = self.kept[at + 1].kind if at + 1 < len(self.kept) else "_NL"
        return before in ("_NL", "RBRACE") and after == "_NL"

    def fits_after(self, at: int, entries: list[Open]) -> bool:
        """True if these brackets are closed correctly from `at` on."""
        waiting = [PAIRS[entry.token.kind] for entry in entries if entry.token.kind != "LBRACE"]
        for token in self.read[at:]:
            if not waiting or token.kind in ("LBRACE", "RBRACE"):
                break
            if token.kind in PAIRS:
                waiting.append(PAIRS[token.kind])
            elif token.kind in OPENERS and waiting.pop() != token.kind:
                return False
        return not waiting

    def wrong_closer(self, opener: Token, token: Token) -> None:
        self.open.pop()
        right = _sign(PAIRS[opener.kind])
        if not self.mistakes.tangled(opener.start, token.start):
            self.mistakes.add(
                "E0012",
                f"`{opener.text}` is closed by `{token.text}`",
                token,
                label=f"expected `{right}`",
                notes=[Note(message="it is opened here", span=self.mistakes.span(opener.start, opener.end))],
            )
        self.kept.append(Token(PAIRS[opener.kind], right, token.start, token.end))

    def unclosed(self, entries: list[Open], at: int, noticed: Token | None) -> int:
        """Reports openers that are never closed, skips their value, and returns the index to continue at."""
        for entry in entries:
            note = f"this `{self.source_text(noticed)}` comes first" if noticed else ""
            where = f"write `{_sign(PAIRS[entry.token.kind])}` where it ends"
            self.never_closed(entry.token, noticed, note, where)
        self.ended_early = self.ended_early or (noticed is not None and noticed.kind == "RBRACE")
        first = entries[0]
        stop = self.value_end(first.read, at)
        del self.kept[first.kept :]
        del self.open[self.open.index(first) :]
        self.kept.append(Token("NAME", UNREAD, first.token.start, self.read[stop - 1].end))
        self.complete = False
        return stop

    def value_end(self, opener: int, limit: int) -> int:
        """Returns the likely end of the value that an unclosed bracket begins: before the next entry, or at `limit`."""
        for at in range(opener + 1, limit):
            if self.read[at].kind == "_NL" and self.read[at - 1].kind not in GOES_ON and self.begins_entry(at + 1):
                return at
        return limit

    def begins_entry(self, at: int) -> bool:
        while at < len(self.read) and self.read[at].kind == "_NL":
            at += 1
        kinds = [token.kind for token in self.read[at : at + 2]]
        if not kinds or kinds[0] in ("RBRACE", "PARAM", "IMPORT"):
            return True
        return len(kinds) == 2 and kinds[0] == "NAME" and kinds[1] in ("EQUAL", "DOT", "LBRACE", *COMPARISONS)

    # -------------------------------------------------------------------------------------------------- braces

    def brace(self, at: int) -> int:
        token = self.read[at]
        if self.one_value:
            return self.brace_as_value(at)
        name = self.header(at)
        if not self.open:
            return self.top_brace(at, name)
        if name is None:
            return self.brace_as_value(at)
        brackets = [entry for entry in self.open if entry.token.kind != "LBRACE"]
        if brackets and self.read[name - 1].kind != "_NL":
            return self.brace_as_value(at)
        if brackets:
            line_end = name - 1
            while self.read[line_end - 1].kind == "_NL":
                line_end -= 1
            return self.unclosed(brackets, line_end, self.read[name])
        if self.is_nested(self.read[name]):
            return self.nested_block(at)
        while self.kept and self.kept[-1].kind == "_NL":
            self.kept.pop()
        header = self.kept.pop()
        self.unclosed_brace(header)
        self.kept.append(header)
        self.open.append(Open(token, len(self.kept), at))
        self.kept.append(token)
        return at + 1

    def header(self, at: int) -> int | None:
        """Returns the index of the name of the block that `{` at `at` opens: at the start of a line or entry."""
        name = at - 1
        while name >= 0 and self.read[name].kind == "_NL":
            name -= 1
        if name < 0 or self.read[name].kind != "NAME":
            return None
        begins = name == 0 or self.read[name - 1].kind in ("_NL", "LBRACE", "RBRACE", "COMMA")
        return name if begins else None

    def top_brace(self, at: int, name: int | None) -> int:
        if name is not None:
            if self.kept[-1].kind == "_NL":  # `{` on the line after the name
                self.kept.pop()
        elif not self.kept:
            self.mistakes.add(
                "E0002",
                "this looks like JSON and not like a job",
                self.read[at],
                label="a job is a list of blocks, `name { … }`",
            )
            raise ParseAbortedError
        elif len(self.kept) > 1 and self.kept[-1].text in ("=", ":") and self.kept[-2].kind == "NAME":
            sign = self.kept.pop()
            block = self.source_text(self.kept[-1])
            self.mistakes.add(
                "E0019",
                f"a block has no `{sign.text}` before its brace",
                sign,
                help=remedy("write ", self.mistakes.replacement(self.kept[-1].end, sign.end, "", f"`{block} {{`")),
            )
            name = at
        if name is None:  # the token before the brace is no name: the block is left out
            after = self.after_brace(at)
            closer = self.read[after - 1]
            self.kept += [self.read[at], Token("RBRACE", "}", closer.end, closer.end)]
            return after
        self.open.append(Open(self.read[at], len(self.kept), at))
        self.kept.append(self.read[at])
        return at + 1

    def is_nested(self, name: Token) -> bool:
        """True if a block inside another is meant to be there: by its indentation, or because all braces match."""
        outer = self.kept[self.open[0].kept - 1]
        if self.mistakes.column(name.start) > self.mistakes.column(outer.start):
            return True
        kinds = [token.kind for token in self.read]
        return kinds.count("LBRACE") <= kinds.count("RBRACE")

    def nested_block(self, at: int) -> int:
        while self.kept and self.kept[-1].kind == "_NL":
            self.kept.pop()
        inner, outer = self.kept.pop(), self.kept[self.open[0].kept - 1]
        if self.kept[-1].kind not in ("LBRACE", "COMMA"):
            self.kept.append(Token("_NL", "", inner.start, inner.start))
        name_text, around = self.source_text(inner), self.source_text(outer)
        self.mistakes.add(
            "E0018",
            f"`{name_text}` is a block inside the block `{around}`: blocks do not nest",
            inner,
            help=f"close `{around}` first, or write a value: `{name_text} = …`",
        )
        self.complete = False
        after = self.after_brace(at)
        return after + (self.read[after : after + 1] != [] and self.read[after].kind == "COMMA")

    def brace_as_value(self, at: int) -> int:
        token = self.read[at]
        self.mistakes.add(
            "E0019",
            "braces hold the entries of a block and are not a value",
            token,
            help="a list is written `[a, b]`, named values are a call's: `name(a = 1, b = 2)`",
        )
        after = self.after_brace(at)
        self.kept.append(Token("NAME", UNREAD, token.start, self.read[after - 1].end))
        return after

    def after_brace(self, at: int) -> int:
        """Returns the index after the block opened at `at`, which is left out as a whole."""
        depth = 0
        for index in range(at, len(self.read)):
            depth += (self.read[index].kind == "LBRACE") - (self.read[index].kind == "RBRACE")
            if depth == 0:
                return index + 1
        self.complete = False
        return len(self.read)

    def never_closed(self, opener: Token, noticed: Token | None, said: str, help: str) -> None:
        """Reports an opener, and what is `said` of the token at which that was noticed."""
        self.mistakes.add(
            "E0010",
            f"this `{opener.text}` is never closed",
            opener,
            label="opened here",
            notes=[Note(message=said, span=self.mistakes.span(noticed.start, noticed.end))] if noticed else [],
            help=help,
        )

    def unclosed_brace(self, noticed: Token | None) -> None:
        opener = self.open.pop().token
        note = f"`{self.source_text(noticed)}` begins here, still inside of it" if noticed else ""
        self.never_closed(opener, noticed, note, "write `}` after the last entry of the block")
        where = noticed.start if noticed else self.end
        if self.kept and self.kept[-1].kind not in ("_NL", "LBRACE"):
            self.kept.append(Token("_NL", "", where, where))
        self.kept.append(Token("RBRACE", "}", where, where))


def _sign(kind: str) -> str:
    return {"LPAR": "(", "RPAR": ")", "LSQB": "[", "RSQB": "]", "LBRACE": "{", "RBRACE": "}"}[kind]
