"""Splits text into tokens, and reports mistakes inside a word, a number or a string.

The words are the terminals of the grammar. If none matches, the mistake is reported and replaced by a token with which
reading can go on: `'text'` still is a string. A character of other languages (`:`, `;`, `&&`) becomes a `FOREIGN`
token, which no rule of the grammar accepts: its explanation depends on its surroundings (explain.py).
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple, NoReturn

from dslc.dsl.bounds import WORDS
from dslc.dsl.remedy import remedy
from dslc.dsl.source import Source, Span
from dslc.dsl.syntax.grammar import terminals
from dslc.dsl.syntax.mistakes import Mistakes, ParseAbortedError, Token
from dslc.dsl.syntax.tree import Comment

MAX_DIGITS = 400  # more than any float has, and far below where int() gives up


UNREAD = "?"  # the text of a NAME in the place of something unreadable


class Lexed(NamedTuple):
    tokens: list[Token]
    comments: list[Comment]


WRITTEN_NUMBER = re.compile(r"[0-9][0-9A-Za-z_]*(\.(?!\.)[0-9A-Za-z_]*)*")
NUMBER_PART = re.compile(r"[0-9]+(_[0-9]+)*(\.[0-9]+(_[0-9]+)*)?([eE][+-]?[0-9]+)?")
# The rest is compiled at the first mistake that needs it, not at the start of every command.
OTHER_BASE = r"0[xXoObB][0-9A-Fa-f_]+"
SINGLE_QUOTED = r"'([^'\\\n]++|\\[^\n])*+'"
SMART_QUOTED = '[“”„‟«»‘’‚]([^“”„‟«»‘’‚"\n]*)[“”‟«»‘’"]'
TRIPLE_QUOTED = r'(?s:"""(.*?)("""|\Z)|\'\'\'(.*?)(\'\'\'|\Z))'
OTHER_COMMENT = r"(?s://[^\n]*|/\*.*?(\*/|\Z)|--[^\n]*)"
CONTINUED = r"\\[ \t]*\r?\n"
CONTROL_SEQUENCE = r"\x1b\[[0-9;]*[A-Za-z]"
FOREIGN = r":=|!=|&&|\|\||[:;!?&|^~@$%\\`]"
ESCAPE = r"\\(.)"
WORD = r"\w+"
SMART_QUOTES = "“”„‟«»‘’‚"

# Characters that look like one of the language.
LOOK_ALIKES = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": "*", "∗": "*", "·": "*", "÷": "/", "∕": "/", "⁄": "/",
    "≤": "<=", "≥": ">=", "≡": "==", "‹": "<", "›": ">", "…": "..", "‥": "..", "、": ",", "。": ".", "‚": ",",
    "【": "[", "】": "]", "꞉": ":", "∶": ":", "µ": "u", "μ": "u",
    **dict(zip("аеорсхуіјѕԁһΑΒΕΖΗΙΚΜΝΟΡΤΥΧАВЕКМНОРСТХο", "aeopcxyijsdhABEZHIKMNOPTYXABEKMHOPCTXo", strict=True)),
}  # fmt: skip
SPACES = {
    "\u00a0": "a no-break space", "\u202f": "a narrow no-break space", "\u3000": "an ideographic space",
    "\u200b": "a zero-width space", "\u200c": "a zero-width mark", "\u200d": "a zero-width mark",
    "\u2060": "a zero-width mark", "\ufeff": "a byte-order mark", "\u2028": "a line separator",
    "\u2029": "a paragraph separator", "\u0085": "a next-line mark", "\u00ad": "a soft hyphen",
    "\r": "a carriage return without a line end", "\v": "a vertical tab", "\f": "a form feed",
}  # fmt: skip


def lex(source: Source, mistakes: Mistakes, start: int = 0, words: int = WORDS.most) -> Lexed:
    """The tokens of a text from `start` on: every line end is one, comments and spaces are none.

    Raises ParseAbortedError, with what is wrong reported, where there are more `words` (tokens and comments) than that.
    """
    return _Lexer(source, mistakes).run(start, words)


def _rare(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)  # `re` caches it


@functools.cache
def _scanner() -> re.Pattern[str]:
    return re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in terminals()))


class _Lexer:
    def __init__(self, source: Source, mistakes: Mistakes) -> None:
        self.match = _scanner().match
        self.source, self.text, self.mistakes = source, source.text, mistakes
        self.tokens: list[Token] = []
        self.comments: list[Comment] = []
        self.depth = 0  # depth of round and square brackets

    def run(self, start: int, words: int) -> Lexed:
        at, text = start, self.text
        if text.startswith("\ufeff", at):
            at += 1
        while at < len(text):
            match = self.match(text, at)
            at = self.take_unknown_text(at) if match is None else self.take_known_token(match)
            if len(self.tokens) + len(self.comments) > words:
                self.too_many(at)
        return Lexed(self.tokens, self.comments)

    def too_many(self, at: int) -> NoReturn:
        self.mistakes.add(
            WORDS.code,
            f"the job is too long: more than {WORDS.most:,} words and signs, with all that it imports",
            (at - 1, at),
            label="up to here",
            help="a generated list belongs in a file that a `python(…)` source reads",
        )
        raise ParseAbortedError

    def take_known_token(self, found: re.Match[str]) -> int:
        """Takes a token of the grammar; returns the offset to continue at."""
        kind, start, end = found.lastgroup or "", found.start(), found.end()
        following = self.text[end : end + 1]
        if kind == "SPACE":
            return end
        if kind == "COMMENT":
            self.comment(start, end)
            return end
        if kind in ("NUMBER", "QUANTITY"):
            return self.number(kind, start, end)
        if kind == "STRING":
            return self.string(start, end)
        if kind == "NAME" or kind in KEYWORD_KINDS:
            if following > "\x7f" and following.isalnum():
                return self.odd_word(start)
        elif kind in ("SLASH", "DOUBLE_SLASH", "MINUS"):
            mark = self.text[start : start + 2]
            if mark == "/*" or (mark in ("//", "--") and self.comment_may_begin(mark)):
                return self.other_comment(start)
        elif kind == "DOT" and "0" <= following <= "9" and not self.follows_value(start):
            return self.leading_dot(start, end)
        return self.take(kind, start, end)

    def take(self, kind: str, start: int, end: int, text: str | None = None) -> int:
        self.tokens.append(Token(kind, self.text[start:end] if text is None else text, start, end))
        self.depth = 0 if kind in ("LBRACE", "RBRACE") else self.depth + DEPTH.get(kind, 0)
        return end

    def comment_may_begin(self, mark: str) -> bool:
        """True if `//` or `--` cannot be an operator here: at the beginning of a line, where no value continues."""
        if self.tokens and self.tokens[-1].kind not in ("_NL", "LBRACE"):
            return False
        before = next((token.kind for token in reversed(self.tokens) if token.kind != "_NL"), "LBRACE")
        return self.depth <= 0 or (mark == "//" and before in ("COMMA", "LPAR", "LSQB"))

    def follows_value(self, start: int) -> bool:
        """True if a value or a name stands directly before, so that a dot may follow it."""
        return bool(self.tokens) and self.tokens[-1].end == start and self.tokens[-1].kind not in ("EQUAL", "COMMA")

    def comment(self, start: int, end: int) -> None:
        line_start = self.text.rfind("\n", 0, start) + 1
        own_line = not self.text[line_start:start].strip(" \t\ufeff")
        text = self.text[start:end].rstrip()
        self.comments.append(Comment(span=Span(self.source, start, start + len(text)), text=text, own_line=own_line))

    # ------------------------------------------------------------------------------------------- numbers, strings

    def number(self, kind: str, start: int, end: int) -> int:
        """Takes a number or a quantity; reports `1__0`, `0x10`, `1.2.3`, `5.` and numbers that no float can hold."""
        written = WRITTEN_NUMBER.match(self.text, start)
        part = NUMBER_PART.match(self.text, start)
        assert written and part
        following = self.text[end : end + 1]
        if following > "\x7f" and following.isalnum() and written.end() <= end:
            return self.odd_word(end, substitute=("NUMBER", start))
        reason = ""
        if self.text[start] == "0" and _rare(OTHER_BASE).fullmatch(written.group()):
            reason = "numbers are written in base ten"
        elif written.end() > end:
            reason = _bad_number(written.group())
        elif sum(map(str.isdigit, part.group())) > MAX_DIGITS or float(part.group().replace("_", "")) == float("inf"):
            reason = "no number can be this large"
            end = part.end()
        if not reason:
            return self.take(kind, start, end)
        stop = max(end, written.end()) if kind == "NUMBER" else written.end()
        shown = self.text[start:stop] if stop - start <= 40 else self.text[start : start + 40] + "…"
        self.mistakes.add("E0007", f"`{shown}` is not a number", (start, stop), label=reason)
        return self.take("NUMBER", start, stop, "0")

    def leading_dot(self, start: int, end: int) -> int:
        part = NUMBER_PART.match(self.text, end)
        assert part
        shown = self.text[start : part.end()]
        self.mistakes.add(
            "E0007",
            f"`{shown}` is not a number",
            (start, part.end()),
            label="a number begins with a digit",
            help=remedy("write ", self.mistakes.replacement(start, part.end(), f"0{shown}")),
        )
        return self.take("NUMBER", start, part.end(), "0")

    def string(self, start: int, end: int) -> int:
        if self.text.startswith('"""', start):
            return self.triple_quoted(start)
        if "\\" not in self.text[start:end]:
            return self.take("STRING", start, end)
        for escape in _rare(ESCAPE).finditer(self.text, start + 1, end - 1):
            if escape.group(1) not in '"\\nt':
                self.mistakes.add(
                    "E0005",
                    f"`{escape.group()}` is not an escape",
                    escape.span(),
                    label='the escapes of a string are `\\"`, `\\\\`, `\\n` and `\\t`',
                    help=f"for a backslash itself write `\\\\{escape.group(1)}`",
                )
        return self.take("STRING", start, end)

    def triple_quoted(self, start: int) -> int:
        match = _rare(TRIPLE_QUOTED).match(self.text, start)
        assert match
        self.mistakes.add(
            "E0006",
            'a string stands between single `"` and on one line',
            (start, start + 3),
            label="three quotes have no meaning here",
            help="write a line end inside a string as `\\n`",
        )
        return self.take("STRING", start, match.end(), '""')

    # ---------------------------------------------------------------------------- what the grammar does not know

    def take_unknown_text(self, at: int) -> int:
        char = self.text[at]
        if char in "\"'" or char in SMART_QUOTES:
            return self.other_quotes(at)
        if char in SPACES:
            self.mistakes.add(
                "E0003",
                f"{SPACES[char]} ({_code_point(char)}) between words",
                (at, at + 1),
                label="this looks like a space but is not one",
                help=remedy(self.mistakes.replacement(at, at + 1, " ", "write a plain space instead"), ", or nothing"),
            )
            return at + 1
        continued = _rare(CONTINUED).match(self.text, at)
        if continued:
            self.mistakes.add(
                "E0026",
                "`\\` does not continue a line",
                (at, at + 1),
                help="a value may continue over several lines inside `( )` and `[ ]`",
            )
            return continued.end()
        foreign = _rare(FOREIGN).match(self.text, at)
        if foreign:
            return self.take("FOREIGN", at, foreign.end())
        if char.isalnum():
            return self.odd_word(at)
        return self.odd_character(at)

    def other_quotes(self, at: int) -> int:
        if self.text.startswith("'''", at):
            return self.triple_quoted(at)
        match = _rare(SINGLE_QUOTED if self.text[at] == "'" else SMART_QUOTED).match(self.text, at)
        if self.text[at] != '"' and match:
            inner = match.group()[1:-1]
            which = "single" if self.text[at] == "'" else "typographic"
            plain = inner.replace('"', '\\"')
            self.mistakes.add(
                "E0006",
                f'a string is written between `"`, not between {which} quotes',
                match.span(),
                help=remedy("write ", self.mistakes.replacement(*match.span(), f'"{plain}"')),
            )
            return self.take("STRING", at, match.end(), '""')
        if self.text[at] in SMART_QUOTES:
            return self.odd_character(at)
        self.mistakes.add(
            "E0004",
            f"this string is never closed: `{self.text[at]}` opens it and the line ends",
            (at, at + 1),
            label="opened here",
            help='write `"` where it ends; a line end inside a string is written `\\n`',
        )
        # The end of the line is taken for the end of the value around the string: `text("corpus.txt),`.
        line = self.text[at + 1 :].partition("\n")[0]
        return self.take("STRING", at, at + 1 + len(line.rstrip(")]}, \t\r")), '""')

    def other_comment(self, start: int) -> int:
        match = _rare(OTHER_COMMENT).match(self.text, start)
        assert match
        mark = match.group()[:2]
        self.mistakes.add("E0009", f"a comment begins with `#`, not with `{mark}`", (match.start(), match.start() + 2))
        return match.end()

    def odd_word(self, at: int, substitute: tuple[str, int] | None = None) -> int:
        """Reports a word with letters that are not ASCII and names them, as they may look like ASCII letters."""
        word = _rare(WORD).match(self.text, at)
        assert word
        odd = at + next(i for i, char in enumerate(word.group()) if char > "\x7f")
        char = self.text[odd]
        plain = _plain(word.group())
        self.mistakes.add(
            "E0003",
            f"`{char}` ({_code_point(char)}{_name(char)}) cannot stand in a name, a number or a unit",
            (odd, odd + 1),
            label="letters are `a` to `z`, digits `0` to `9`",
            help=remedy("write ", self.mistakes.replacement(at, word.end(), plain)) if plain else "",
        )
        kind, start = substitute or ("NAME", at)
        known = self.match(plain) if plain else None
        name = plain if known and known.lastgroup == "NAME" and known.end() == len(plain) else UNREAD
        return self.take(kind, start, word.end(), "0" if kind == "NUMBER" else name)

    def odd_character(self, at: int) -> int:
        char = self.text[at]
        plain = LOOK_ALIKES.get(char) or _plain(char)
        match = self.match(plain) if plain else None
        shown = f"`{char}` " if char.isprintable() else ""
        message = f"the character {shown}({_code_point(char)}{_name(char)}) has no meaning here"
        help = remedy("write ", self.mistakes.replacement(at, at + 1, plain)) if plain else ""
        self.mistakes.add("E0003", message, (at, at + 1), help=help)
        if match and match.end() == len(plain) and match.lastgroup:
            return self.take(match.lastgroup, at, at + 1, plain)
        sequence = _rare(CONTROL_SEQUENCE).match(self.text, at)
        return sequence.end() if sequence else at + 1


DEPTH = {"LPAR": 1, "LSQB": 1, "RPAR": -1, "RSQB": -1}
KEYWORD_KINDS = frozenset({"PARAM", "IMPORT", "TRUE", "FALSE", "NONE"})


def _bad_number(text: str) -> str:
    if "__" in text or "_." in text or "._" in text or text.endswith("_"):
        return "an underscore stands between two digits"
    if text.endswith("."):
        return "digits stand on both sides of the point"
    if text.count(".") > 1:
        return "a number has at most one point"
    return "digits, at most one point between them, and perhaps an exponent: `3e-4`"


def _code_point(char: str) -> str:
    return f"U+{ord(char):04X}"


def _name(char: str) -> str:
    import unicodedata  # only for a rare mistake

    name = unicodedata.name(char, "")
    return f", {name.capitalize()}" if name else ""


def _plain(text: str) -> str:
    """Returns the word in ASCII if Unicode has an equivalent, as for full-width letters and for `µ`."""
    import unicodedata

    plain = "".join(LOOK_ALIKES.get(char) or unicodedata.normalize("NFKD", char) for char in text)
    plain = "".join(char for char in plain if not unicodedata.combining(char))
    return plain if plain.isascii() and plain.isprintable() and plain.strip() and plain != text else ""
