"""The files for editors agree with the grammar: TextMate, Pygments, VS Code, Neovim and Helix."""

from __future__ import annotations

import json
import re
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
from helpers.golden import hold
from helpers.paths import EXAMPLES, ROOT
from pygments.token import Comment, Error, Name, Text

from dslc.dsl.editor.scopes import Role, ScopedToken
from dslc.dsl.editor.snapshot import Snapshot
from dslc.dsl.editor.textmate import SCOPE, textmate_grammar
from dslc.dsl.syntax.grammar import terminals
from dslc.dsl.syntax.mistakes import PAIRS
from dslc.editor.pygments_lexer import PltLexer

EDITORS = ROOT / "editors"
TEXTMATE = EDITORS / "vscode" / "syntaxes" / "plt.tmLanguage.json"
JOBS = [*sorted(EXAMPLES.glob("*.plt")), *sorted((ROOT / "benchmarks" / "jobs").glob("*.plt"))]
# The scopes that a token of each role may have.
SCOPES: dict[Role, set[str]] = {
    "block": {"entity.name.type.plt", "variable.other.member.plt"},
    "field": {"variable.other.member.plt", "variable.other.plt"},  # before a dot or a comparison, a plain name
    "param": {"variable.other.member.plt", "variable.other.plt"},
    "call": {"entity.name.function.plt"},
    "argument": {"variable.other.member.plt"},
    "name": {"variable.other.plt"},
    "keyword": {"keyword.control.plt"},
    "literal": {"constant.language.plt"},
    "number": {"constant.numeric.plt"},
    "string": {"string.quoted.double.plt"},
    "operator": {"keyword.operator.plt"},
    "comparison": {"keyword.operator.comparison.plt"},
    "bracket": {"punctuation.plt"},
}


def test_the_textmate_grammar_is_that_of_the_terminals() -> None:
    hold(json.dumps(textmate_grammar(), indent=2) + "\n", TEXTMATE)


def test_every_terminal_has_a_pattern() -> None:
    patterns = [entry["match"] for entry in json.loads(TEXTMATE.read_text())["patterns"]]
    for name, pattern in terminals():
        assert name in ("_NL", "SPACE") or any(p.startswith(pattern) for p in patterns), name


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_textmate_splits_jobs_as_the_lexer_does(path: Path) -> None:
    text = path.read_text()
    scopes = textmate_scopes(text)
    for token in words_of(text):
        found = scopes.get((token.token.start, token.token.end))
        assert found in SCOPES[token.role], (token.token.text, token.role, found)


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_pygments_splits_jobs_as_the_lexer_does(path: Path) -> None:
    text = path.read_text()
    found = list(PltLexer().get_tokens_unprocessed(text))
    assert "".join(part for _, _, part in found) == text
    assert not any(kind is Error for _, kind, _ in found)
    parts = {(at, at + len(part)): kind for at, kind, part in found}
    for token in words_of(text):
        assert parts[token.token.start, token.token.end] is not Text, token


def test_pygments_gives_all_of_a_text_with_mistakes() -> None:
    text = "train {\n  optimizer = sgd(lr = µ\n  # open\n  x = 'a' \0 \"b\ndata {"
    found = list(PltLexer().get_tokens_unprocessed(text))
    assert "".join(part for _, _, part in found) == text
    assert all(a + len(part) == b for (a, _, part), (b, _, _) in pairwise(found))
    assert [kind for _, kind, part in found if part == "train"] == [Name.Class]
    assert [part for _, kind, part in found if kind is Comment.Single] == ["# open"]


def test_the_settings_of_vs_code_are_those_of_the_language() -> None:
    package = json.loads((EDITORS / "vscode" / "package.json").read_text())
    (language,) = package["contributes"]["languages"]
    (grammar,) = package["contributes"]["grammars"]
    assert language["extensions"] == [".plt"] and grammar["language"] == language["id"] == "plt"
    assert grammar["scopeName"] == SCOPE and (EDITORS / "vscode" / grammar["path"]).resolve() == TEXTMATE
    assert package["version"] == version_of(ROOT / "pyproject.toml")
    settings = json.loads((EDITORS / "vscode" / "language-configuration.json").read_text())
    signs = {name: pattern.removeprefix("\\") for name, pattern in terminals()}
    pairs = {(signs[opener], signs[closer]) for opener, closer in PAIRS.items()}
    assert {tuple(pair) for pair in settings["brackets"]} == pairs
    assert re.match(signs["COMMENT"], settings["comments"]["lineComment"])
    assert settings["wordPattern"] == dict(terminals())["NAME"]


def test_the_settings_of_helix_and_neovim_start_the_server() -> None:
    helix = tomllib.loads((EDITORS / "helix" / "languages.toml").read_text())
    (language,) = helix["language"]
    assert language["file-types"] == ["plt"] and language["scope"] == SCOPE
    (name,) = language["language-servers"]
    server = helix["language-server"][name]
    assert [server["command"], *server["args"]] == ["dslc", "lsp"]
    neovim = (EDITORS / "neovim" / "dslc.lua").read_text()
    assert 'extension = { plt = "plt" }' in neovim and 'cmd = { "dslc", "lsp" }' in neovim


def words_of(text: str) -> list[ScopedToken]:
    """Returns the tokens of a text that have a role."""
    return [token for token in Snapshot(text, "job.plt").tokens if token.role != "unknown"]


def textmate_scopes(text: str) -> dict[tuple[int, int], str]:
    """Colours a text as an editor does: line by line, the earliest match, and of those the first pattern's."""
    patterns = [(re.compile(entry["match"]), entry["name"]) for entry in json.loads(TEXTMATE.read_text())["patterns"]]
    scopes: dict[tuple[int, int], str] = {}
    begin = 0
    for line in text.splitlines():
        at = 0
        while True:
            matches = [(found.start(), n, found) for n, (p, _) in enumerate(patterns) if (found := p.search(line, at))]
            if not matches:
                break
            _, number, found = min(matches, key=lambda match: match[:2])
            scopes[begin + found.start(), begin + found.end()] = patterns[number][1]
            at = max(found.end(), at + 1)
        begin += len(line) + 1
    return scopes


def version_of(path: Path) -> str:
    version: str = tomllib.loads(path.read_text())["project"]["version"]
    return version
