"""Tokens with their roles and scopes, for texts with any mistakes.

The walk needs no tree: it follows braces, brackets, `=` and line ends. Where a bracket was never closed, a line that
begins a known block, a `param` or a known field of the block ends the value before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from dslc.dsl.diagnostics import Note, Report
from dslc.dsl.language import blocks  # noqa: F401  (fills the registry)
from dslc.dsl.language.registry import BLOCKS, CALLS, PATH_BLOCKS, fields
from dslc.dsl.source import Source, Span
from dslc.dsl.syntax.lexer import Lexed, lex
from dslc.dsl.syntax.mistakes import COMPARISONS, OPENERS, OPERATORS, PAIRS, Mistakes, Token

Role = Literal[
    "block", "field", "param", "call", "argument", "name", "keyword", "literal", "number", "string", "operator",
    "comparison", "bracket", "unknown",
]  # fmt: skip
TOP_WORDS = frozenset({*BLOCKS, *PATH_BLOCKS})  # the words of all blocks
_ROLES: dict[str, Role] = {
    "PARAM": "keyword", "IMPORT": "keyword", "TRUE": "literal", "FALSE": "literal", "NONE": "literal",
    "NUMBER": "number", "QUANTITY": "number", "STRING": "string", "FOREIGN": "unknown", "EQUAL": "operator",
    **dict.fromkeys(OPERATORS, "operator"), **dict.fromkeys(COMPARISONS, "comparison"),
    **dict.fromkeys([*PAIRS, *OPENERS, "COMMA", "DOT"], "bracket"),
}  # fmt: skip


def terminal_role(kind: str) -> Role:
    """Returns the role of a terminal of the grammar that is no name."""
    return _ROLES[kind]


class OpenBracket(NamedTuple):
    """A bracket that is open: of a call with its `name`, of a list (`[`), or of a group (`(`).

    `argument` is the name of the argument that is being written, `commas` the number of commas before it, and `names`
    are the arguments that were named before.
    """

    name: str
    argument: str = ""
    commas: int = 0
    names: tuple[str, ...] = ()


class Scope(NamedTuple):
    """The place of a token: its block, the path of its entry, whether it stands in the value, and the open brackets.

    `statement` is `param`, `import` or a top-level name outside of blocks.
    """

    block: str = ""
    path: tuple[str, ...] = ()
    in_value: bool = False
    brackets: tuple[OpenBracket, ...] = ()
    statement: str = ""


class ScopedToken(NamedTuple):
    token: Token
    role: Role
    scope: Scope


class SilentMistakes(Mistakes):
    """Reports nothing and never gives up, so that every text has tokens."""

    def add(
        self, code: str, message: str, where: Token | Span | tuple[int, int], *, label: str = "",
        notes: Iterable[Note] = (), help: str = "",
    ) -> None:  # fmt: skip
        pass


def read_tokens(source: Source) -> Lexed:
    """Returns the tokens and comments of any text."""
    return lex(source, SilentMistakes(source, Report()), words=len(source.text) + 1)


def scope_tokens(tokens: list[Token], text: str) -> tuple[list[ScopedToken], Scope]:
    """Returns each token with its role and the scope before it, and the scope after the last."""
    walk = _ScopeWalk(tokens, text)
    return [walk.step(at) for at in range(len(tokens))], walk.scope


def argument_names(call: str) -> set[str]:
    return {f.word for calls in CALLS.values() if call in calls for f in fields(calls[call])}


class _ScopeWalk:
    def __init__(self, tokens: list[Token], text: str) -> None:
        self.tokens, self.text = tokens, text
        self.scope = Scope()
        self.name = ""  # the last name outside of values

    def step(self, at: int) -> ScopedToken:
        token = self.tokens[at]
        if self.begins_line(at) and self.begins_statement(at):
            self.scope = Scope()
        elif self.begins_line(at) and self.begins_field(at):
            self.scope = Scope(block=self.scope.block)
        role = self.role(at)
        scoped = ScopedToken(token, role, self.scope)
        self.scope = self.following(at, role)
        return scoped

    def kind(self, at: int) -> str:
        return self.tokens[at].kind if 0 <= at < len(self.tokens) else "$END"

    def begins_line(self, at: int) -> bool:
        return self.kind(at - 1) in ("_NL", "$END")

    def begins_statement(self, at: int) -> bool:
        """True if a line begins a block, or a `param` or `import` at the first column."""
        token = self.tokens[at]
        if token.kind == "NAME" and self.kind(at + 1) == "LBRACE":
            return token.text in TOP_WORDS or self.at_first_column(token)
        return token.kind in ("PARAM", "IMPORT") and self.at_first_column(token)

    def at_first_column(self, token: Token) -> bool:
        return token.start == 0 or self.text[token.start - 1] == "\n"

    def begins_field(self, at: int) -> bool:
        """True if a line inside open brackets sets a field of the block, and no argument of the call."""
        block, brackets = self.scope.block, self.scope.brackets
        if not brackets or block not in BLOCKS or self.kind(at) != "NAME" or self.kind(at + 1) != "EQUAL":
            return False
        word = self.tokens[at].text
        if any(word in argument_names(bracket.name) for bracket in brackets[-1:]):
            return False
        return any(word == f.word for f in fields(BLOCKS[block]))

    def role(self, at: int) -> Role:
        token, scope = self.tokens[at], self.scope
        if token.kind != "NAME":
            return _ROLES.get(token.kind, "unknown")
        if scope.in_value:
            following = self.kind(at + 1)
            if following == "LPAR":
                return "call"
            in_call = scope.brackets and scope.brackets[-1].name not in ("[", "(")
            return "argument" if in_call and following == "EQUAL" else "name"
        if scope.block:
            return "field"
        return "param" if scope.statement == "param" else "block"

    def following(self, at: int, role: Role) -> Scope:
        """Returns the scope after a token."""
        token, scope = self.tokens[at], self.scope
        match token.kind:
            case "_NL":
                between = self.kind(at + 1) == "LBRACE" and not scope.block
                return scope if scope.brackets or between else Scope(block=scope.block)
            case "LBRACE":
                return Scope(block=self.name)
            case "RBRACE":
                return Scope()
            case "PARAM" | "IMPORT" if not scope.block and not scope.in_value:
                return scope._replace(statement=token.text)
            case "NAME" if not scope.in_value:
                self.name = token.text
                if scope.block:
                    return scope._replace(path=(*scope.path, token.text))
                return scope._replace(path=(token.text,), statement=scope.statement or token.text)
            case "EQUAL" if scope.in_value:
                return self.with_argument(at)
            case "COMMA" if scope.brackets:
                last = scope.brackets[-1]
                return self.replace_bracket(last._replace(argument="", commas=last.commas + 1))
            case "COMMA" if scope.block:
                return Scope(block=scope.block)
            case "LPAR" | "LSQB" if scope.in_value:
                called = token.kind == "LPAR" and self.kind(at - 1) == "NAME"
                name = self.tokens[at - 1].text if called else token.text
                return scope._replace(brackets=(*scope.brackets, OpenBracket(name)))
            case "RPAR" | "RSQB" if scope.brackets:
                return scope._replace(brackets=scope.brackets[:-1])
        if role == "comparison" or token.kind == "EQUAL":
            return scope._replace(in_value=True)
        return scope

    def with_argument(self, at: int) -> Scope:
        brackets = self.scope.brackets
        if not brackets or self.kind(at - 1) != "NAME":
            return self.scope
        name = self.tokens[at - 1].text
        return self.replace_bracket(brackets[-1]._replace(argument=name, names=(*brackets[-1].names, name)))

    def replace_bracket(self, bracket: OpenBracket) -> Scope:
        return self.scope._replace(brackets=(*self.scope.brackets[:-1], bracket))
