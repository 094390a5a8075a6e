"""The parser: the texts that it accepts, its messages for mistakes, and that lark reads the grammar as we do.

`UPDATE_GOLDEN=1 pytest tests/dsl/syntax/test_parser.py` writes the messages beside the malformed snippets anew; read
the difference before you commit it.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lark
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from instruments.texts import JOBS, job_texts, mutated
from lark.lexer import Lexer as LarkLexer

import dslc.grammar
from dslc.dsl.bounds import ALL
from dslc.dsl.codes import FOLDER, explain, titles
from dslc.dsl.diagnostics import Report
from dslc.dsl.language import blocks  # noqa: F401  (fills the registry, whose names a message knows)
from dslc.dsl.show import render, to_json
from dslc.dsl.source import Source
from dslc.dsl.syntax import tree
from dslc.dsl.syntax.bracket_matching import lay_out
from dslc.dsl.syntax.lexer import UNREAD, lex
from dslc.dsl.syntax.mistakes import MAX_MISTAKES, Mistakes, ParseAbortedError
from dslc.dsl.syntax.parser import SettingText, parse, parse_expression, parse_setting

GRAMMAR = Path(next(iter(dslc.grammar.__path__)))
MALFORMED = sorted((GRAMMAR / "malformed").glob("*.plt"))


def read(text: str) -> tuple[tree.Document | None, Report]:
    report = Report()
    return parse(Source("job.plt", text), report), report


def good(text: str) -> tree.Document:
    document, report = read(text)
    assert not report, render(report, color=False)
    assert document is not None
    assert document.complete
    return document


def value(text: str) -> Any:
    report = Report()
    made = parse_expression(Source("<--set 1>", text), report)
    assert not report, render(report, color=False)
    return made


def shape(node: object) -> Any:
    """Returns a tree without its spans, as nested tuples."""
    if isinstance(node, tree.Node):
        fields = {name: part for name, part in vars(node).items() if name not in ("span", "source", "comments")}
        parts = {name: shape(part) for name, part in fields.items() if not name.endswith("_span")}
        return (type(node).__name__, *parts.values())
    return tuple(map(shape, node)) if isinstance(node, tuple) else node


# ------------------------------------------------------------------------------------------------- what is allowed


def test_a_file_has_all_kinds_of_statements() -> None:
    text = 'language = 1\nimport "a.plt"\nparam x = 2\nparam y\nparallelism = auto\nmodel {\n  a = 1\n}\n'
    kinds = [type(statement) for statement in good(text).statements]
    assert kinds == [tree.Language, tree.Import, tree.Param, tree.Param, tree.BlockValue, tree.Block]


@pytest.mark.parametrize(
    "text",
    [
        "a { x = 1, y = 2 }",
        "a { x = 1, y = 2, }",
        "a {\n  x = 1,\n  y = 2\n}\n",
        "a {\n\n  x = 1\n\n\n  y = 2 }",
        "a\n{\n  x = 1\n  y = 2\n}",
        "a { x = 1 # one\n y = 2 } # two",
        "\ufeff# first\r\n\r\na {\r\n  x = 1\r\n  y = 2\r\n}\r\n",
        "\ta\t{\tx\t=\t1\n\ty\t=\t2 }",
        "a { x = 1 } a { y = 2 }",
    ],
)
def test_entries_end_with_a_line_or_a_comma(text: str) -> None:
    entries = [entry for block in good(text).statements if isinstance(block, tree.Block) for entry in block.entries]
    assert [entry.path for entry in entries if isinstance(entry, tree.Entry)] == [("x",), ("y",)]


def test_a_path_and_comparisons() -> None:
    (sweep, expect) = good("sweep { a.b.c = [1, 2] }\nexpect { a == 1, b < 2%, c <= 3, d >= 4, e > 5 }").statements
    assert isinstance(sweep, tree.Block)
    assert isinstance(expect, tree.Block)
    assert isinstance(sweep.entries[0], tree.Entry)
    assert sweep.entries[0].path == ("a", "b", "c")
    assert sweep.entries[0].name_span.text() == "a.b.c"
    assert [e.operator for e in expect.entries if isinstance(e, tree.Comparison)] == ["==", "<", "<=", ">=", ">"]


def num(number: float) -> tuple[str, float, str]:
    return ("Number", number, str(number))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 + 2 * 3", ("Binary", "+", num(1), ("Binary", "*", num(2), num(3)))),
        ("1 - 2 - 3", ("Binary", "-", ("Binary", "-", num(1), num(2)), num(3))),
        ("2 ** 3 ** 4", ("Binary", "**", num(2), ("Binary", "**", num(3), num(4)))),
        ("-2 ** 2", ("Unary", "-", ("Binary", "**", num(2), num(2)))),
        ("2 ** -1", ("Binary", "**", num(2), ("Unary", "-", num(1)))),
        ("8 // 2 / 2", ("Binary", "/", ("Binary", "//", num(8), num(2)), num(2))),
        ("(1 + 2) * 3", ("Binary", "*", ("Group", ("Binary", "+", num(1), num(2))), num(3))),
        ("1..4", ("RangeOf", num(1), num(4))),
        ("1 .. 2 + 2", ("RangeOf", num(1), ("Binary", "+", num(2), num(2)))),
        ("[]", ("List", ())),
        ("[1,\n 2,\n]", ("List", (num(1), num(2)))),
        ("f", ("Name", "f")),
        ("f()", ("CallOf", "f", ())),
        ("f(1, a = 2,)", ("CallOf", "f", (("Argument", None, num(1)), ("Argument", "a", num(2))))),
        ("true", ("Boolean", True)),
        ("none", ("NoneLiteral",)),
    ],
)
def test_expressions(text: str, expected: object) -> None:
    assert shape(value(text)) == expected


@pytest.mark.parametrize(
    ("text", "number"),
    [("20_000", 20000), ("3e-4", 3e-4), ("1.5E3", 1500.0), ("0.5", 0.5), ("007", 7), ("1_0.2_5", 10.25)],
)
def test_numbers(text: str, number: float) -> None:
    made = value(text)
    assert (made.value, made.text, type(made.value)) == (number, text, type(number))


@pytest.mark.parametrize(
    ("text", "number", "unit", "joined"),
    [
        ("76GiB", 76, "GiB", True),
        ("20%", 20, "%", True),
        ("20 %", 20, "%", False),
        ("1 epoch", 1, "epoch", False),
        ("1f1b", 1, "f1b", True),
        ("1.5e3ms", 1500.0, "ms", True),
        ("3e4", None, "", True),
        ("3e4x", 3e4, "x", True),
        ("1e", 1, "e", True),
    ],
)
def test_quantities(text: str, number: float | None, unit: str, joined: bool) -> None:
    made = value(text)
    if number is None:
        assert isinstance(made, tree.Number)
        return
    assert (made.value, made.unit, made.joined, made.unit_span.text()) == (number, unit, joined, unit)


@pytest.mark.parametrize("after", ["= 1", "(1)", "{ }", "< 2", "== 2", ".b = 3"])
def test_a_word_with_which_something_begins_is_no_unit(after: str) -> None:
    """`64 shuffle = true` lacks a comma: `shuffle` is not the unit of 64."""
    _, report = read(f"data {{ batch = 64 shuffle {after} }}")
    assert "E0008" not in {d.code for d in report}
    assert report.errors[0].span is not None
    assert report.errors[0].code in ("E0017", "E0019")


def test_strings_and_their_escapes() -> None:
    assert value(r'"a \"b\" \\ \n \t é → #"').value == 'a "b" \\ \n \t é → #'


def test_every_node_knows_its_place() -> None:
    document = good("# c\nmodel {\n  network = f(a = [1, 2 GiB], -x) # d\n}\n")
    (block,) = document.statements
    assert isinstance(block, tree.Block)
    (entry,) = block.entries
    assert isinstance(entry, tree.Entry)
    assert isinstance(entry.value, tree.CallOf)
    first, second = entry.value.arguments
    assert [entry.span.text(), entry.value.name_span.text()] == ["network = f(a = [1, 2 GiB], -x)", "f"]
    assert [first.span.text(), first.value.span.text(), second.value.span.text()] == [
        "a = [1, 2 GiB]",
        "[1, 2 GiB]",
        "-x",
    ]
    assert str(block.name_span) == "job.plt:2:1"
    assert [(comment.text, comment.own_line) for comment in document.comments] == [("# c", True), ("# d", False)]


# -------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize("snippet", MALFORMED, ids=lambda path: path.stem)
def test_a_malformed_snippet_gets_the_message_it_deserves(snippet: Path) -> None:
    source = Source(snippet.name, snippet.read_bytes().decode())
    report = Report()
    parse(source, report)
    assert report.errors
    shown = render(report, color=False)
    golden = snippet.with_suffix(".txt")
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(shown, encoding="utf-8")
    assert shown == golden.read_text(encoding="utf-8")


BOUNDS = {bound.code for bound in ALL} - {"E0028"}  # for texts that are too large see test_hostile.py


def test_every_code_is_shown_by_a_snippet_and_explained() -> None:
    shown = "".join(snippet.with_suffix(".txt").read_text(encoding="utf-8") for snippet in MALFORMED)
    codes = [code for code in titles() if code.startswith("E00") and code not in BOUNDS]
    assert [code for code in codes if f"[{code}]" not in shown] == []
    written = "".join(path.read_text() for path in Path(lex.__code__.co_filename).parent.glob("*.py"))
    assert [code for code in codes if f'"{code}"' not in written] == []


def examples(code: str) -> tuple[str, str]:
    """Returns the wrong and the right example of a code's page."""
    page = explain(code) or ""
    parts = page.partition("\nWrong:\n")[2].partition("\nRight:\n")
    wrong, right = ("".join(f"{line[4:]}\n" for line in part.split("\n")) for part in (parts[0], parts[2]))
    return wrong, right


SHOWN = [code for code in titles() if code.startswith("E00") and "Wrong" in str(explain(code))]


@pytest.mark.parametrize("code", [code for code in SHOWN if code not in BOUNDS])
def test_the_example_of_a_code_has_it_and_the_corrected_one_has_not(code: str) -> None:
    wrong, right = examples(code)
    assert {d.code for d in read(wrong)[1]} == {code}
    good(right)


def test_titles_are_the_first_lines() -> None:
    assert (Path(FOLDER) / "E0010.md").read_text().startswith(f"# {titles()['E0010']}\n")
    assert explain("e0010") == explain("E0010")
    assert explain("E9999") is None
    assert explain("../E0010") is None


def test_an_entry_with_a_mistake_keeps_its_name() -> None:
    document, report = read("data {\n  batch = 1__0\n  workers 4\n  source = digits()\n}\nexpect { bubble < }\n")
    assert [d.code for d in report] == ["E0007", "E0013", "E0014"]
    assert document is not None
    assert document.complete
    data, expect = document.statements
    assert isinstance(data, tree.Block)
    assert isinstance(expect, tree.Block)
    read_as = [(e.path[0], type(e.value)) for e in data.entries if isinstance(e, tree.Entry)]
    assert read_as == [("batch", tree.UnreadValue), ("workers", tree.UnreadValue), ("source", tree.CallOf)]
    assert isinstance(expect.entries[0], tree.Comparison)
    assert isinstance(expect.entries[0].value, tree.UnreadValue)


def test_what_is_left_out_is_told() -> None:
    document, _ = read("data {\n  3 = batch\n}\n")
    assert document is not None
    assert not document.complete


def test_after_fifty_mistakes_a_text_is_read_no_further() -> None:
    document, report = read("a {\n" + "b 1\n" * 5000 + "}\n")
    assert document is None
    assert len(report.found) == MAX_MISTAKES


@given(st.sampled_from(JOBS).flatmap(mutated))
@settings(max_examples=150)
def test_mutated_jobs_give_diagnostics_and_never_an_exception(text: str) -> None:
    check_anything(text)


@given(st.text(st.sampled_from("ab1 .=,:\n\t(){}[]\"'#%<>+-*/\\_$é“ "), max_size=60))
@example("f(" * 500)
@example("a = " + "[" * 500 + "]" * 500)
@example("a = " + "-" * 500 + "1")
@example("a = " + "1+" * 500 + "1")
@example("a = " + "1**" * 500 + "1")
@example("a = 1e" + "9" * 5000 + "\nb = " + "9" * 5000)
@example("a{" * 300)
@example("a = (\n" * 300)
@example("}" * 300)
@settings(max_examples=300)
def test_any_text_gives_diagnostics_or_a_document(text: str) -> None:
    check_anything(text)
    report = Report()
    made = parse_expression(Source("<--set 1>", text), report)
    assert (made is None) == bool(report)
    parse_setting(Source("<--set 1>", text), report)
    render(report, color=False)


@given(st.text(max_size=40))
@settings(max_examples=100)
def test_any_character_may_come(text: str) -> None:
    check_anything(text)


def check_anything(text: str) -> None:
    document, report = read(text)
    assert document is not None or report.errors
    render(report, color=False)
    to_json(report)
    names = [getattr(node, "name", "") for node in (document.statements if document else ())]
    assert UNREAD not in names
    for diagnostic in report:
        assert diagnostic.span is not None
        assert 0 <= diagnostic.span.start <= diagnostic.span.end <= len(text)
        assert explain(diagnostic.code)
    if not report:
        assert document is not None
        assert document.complete


# ------------------------------------------------------------------------------------------- one value, one setting


def test_a_setting_has_its_path_and_its_value() -> None:
    source = Source("<--set 2>", "train.optimizer.lr = 1e-3")
    setting = parse_setting(source, Report())
    assert isinstance(setting, SettingText)
    assert setting.path == ("train", "optimizer", "lr")
    assert setting.path_span.text() == "train.optimizer.lr"
    assert isinstance(setting.value, tree.Number)
    assert str(setting.value.span) == "<--set 2>:1:22"


@pytest.mark.parametrize("text", ["corpus.txt", "/data/my file", "C:\\x", "a=b", ""])
def test_text_that_is_no_expression_is_kept(text: str) -> None:
    setting = parse_setting(Source("<--set 1>", f"file= {text}"), Report())
    assert setting is not None
    assert (setting.value, setting.text, setting.text_span.text()) == (None, text, text)
    assert setting.mistakes.errors


@pytest.mark.parametrize("text", ["batch", "=3", "a b=3", "a..b=3", "2x=3", '"a"=3', "param=3", "a.=1"])
def test_a_setting_without_a_path_is_a_mistake(text: str) -> None:
    report = Report()
    assert parse_setting(Source("<--set 1>", text), report) is None
    assert [d.code for d in report] in (["E0013"], ["E0021"])


def test_a_value_is_one() -> None:
    report = Report()
    assert parse_expression(Source("<--set 1>", "1, 2"), report) is None
    assert [d.code for d in report] == ["E0017"]


def test_entries_on_one_line_are_all_read() -> None:
    text = "data { source = digits(size = [2, 2]) batch = 64 }\nexpect { bubble < 2% a.b = 1 c >= 1 }\n"
    document, report = read(text)
    assert [(d.code, d.span and d.span.start) for d in report] == [("E0017", 37), ("E0017", 71)]
    assert document is not None and document.complete
    assert [len(block.entries) for block in document.statements if isinstance(block, tree.Block)] == [2, 3]


# ------------------------------------------------------------------------------------------------- lark, the cache


class OurTokens(LarkLexer):
    """Passes our tokens to lark's own parser."""

    def __init__(self, conf: Any) -> None:
        pass

    def lex(self, data: Any, parser_state: Any = None) -> Iterator[lark.Token]:
        mistakes = Mistakes(Source("job.plt", data), Report())
        try:
            laid = lay_out(lex(mistakes.source, mistakes).tokens, mistakes)
        except ParseAbortedError:
            laid = None
        if laid is None or mistakes.offsets:
            raise lark.exceptions.LexError
        for token in laid.tokens[:-1]:
            yield lark.Token(token.kind, token.text, token.start)


LARK = lark.Lark((GRAMMAR / "plt.lark").read_text(), parser="lalr", lexer=OurTokens, start="start")


@pytest.mark.slow
@given(st.one_of(job_texts(), job_texts().flatmap(mutated)))
@settings(max_examples=150)
def test_lark_itself_accepts_what_we_accept(text: str) -> None:
    _, report = read(text)
    if {d.code for d in report} & {"E0001", "E0002", "E0020", "E0025", "E0028"}:
        return  # not a matter of the grammar
    try:
        LARK.parse(text)
        accepted = True
    except lark.exceptions.LarkError:
        accepted = False
    assert accepted == (not report), render(report, color=False)


def run_python(code: str, cache: Path, *arguments: str) -> str:
    environment = {key: item for key, item in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


PARSED = """
from dslc.dsl.diagnostics import Report
from dslc.dsl.syntax.parser import parse
from dslc.dsl.source import Source
assert parse(Source("a", "a { b = 1 }"), Report())
"""
# The same where Lark may not compile a grammar: it is read from the cache, or this fails.
READ = "import lark.lark\ndel lark.lark.load_grammar" + PARSED


def kept_in(cache: Path) -> list[Path]:
    return sorted((cache / "dslc").iterdir())


@pytest.mark.processes
def test_lark_compiles_the_grammar_once_and_then_reads_it_from_the_users_cache(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        run_python(READ, tmp_path / "empty")
    run_python(PARSED, tmp_path)
    (kept,) = kept_in(tmp_path)
    assert (tmp_path / "dslc").stat().st_mode & 0o777 == 0o700
    assert kept.stat().st_mode & 0o777 == 0o600
    run_python(READ, tmp_path)


@pytest.mark.processes
def test_a_damaged_cache_is_made_anew(tmp_path: Path) -> None:
    run_python(PARSED, tmp_path)
    (kept,) = kept_in(tmp_path)
    whole = kept.read_bytes()
    for damage in (whole[:100], b"", whole[:200] + b"\xff" + whole[201:], whole[:-1]):
        kept.write_bytes(damage)
        run_python(PARSED, tmp_path)
        run_python(READ, tmp_path)


class Bomb:
    """Returns a pickle that creates a file when it is read."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.made,)


@pytest.mark.processes
@pytest.mark.parametrize("writable", ["cache/dslc", "cache", "."])
def test_a_cache_that_others_can_write_to_or_replace_is_not_read(tmp_path: Path, writable: str) -> None:
    cache, made = tmp_path / "cache", tmp_path / "made"
    run_python(PARSED, cache)
    (kept,) = kept_in(cache)
    forged = pickle.dumps(Bomb(made))
    kept.write_bytes(zlib.crc32(forged).to_bytes(4, "little") + forged)
    mode = (tmp_path / writable).stat().st_mode
    (tmp_path / writable).chmod(0o777)
    run_python(PARSED, cache)
    assert not made.exists()
    (tmp_path / writable).chmod(mode)
    with pytest.raises(subprocess.CalledProcessError):
        run_python(PARSED, cache)
    assert made.exists()  # the forgery is one that would have run


@pytest.mark.processes
def test_without_a_cache_it_works_too(tmp_path: Path) -> None:
    (tmp_path / "dslc").write_text("a file where the folder should be")
    run_python(PARSED, tmp_path)
    other = tmp_path / "other"
    (other / "dslc").mkdir(parents=True)
    (other / "dslc").chmod(0o777)  # others could write to it, so it is not trusted
    run_python(PARSED, other)
    assert kept_in(other) == []
    run_python(PARSED, Path("/dev/null/nowhere"))


@pytest.mark.processes
def test_a_folder_where_the_file_should_be_is_no_reason_to_fail(tmp_path: Path) -> None:
    run_python(PARSED, tmp_path)
    (kept,) = kept_in(tmp_path)
    kept.unlink()
    kept.mkdir()
    run_python(PARSED, tmp_path)


def test_texts_are_read_at_the_same_time() -> None:
    """One Lark parser serves all threads, and each thread gets the tree of its own text."""
    texts = [f"a {{ x{n} = [{', '.join(['1'] * 200)}] b {n} }}" for n in range(40)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda text: render(read(text)[1], color=False), texts))
    assert together == [render(read(text)[1], color=False) for text in texts]


def test_what_follows_from_a_mistake_before_it_is_broken_and_said_nothing_of() -> None:
    document, report = read("data {\n  batch\n")
    assert [d.code for d in report] == ["E0010"]
    assert document is not None
    (block,) = document.statements
    assert isinstance(block, tree.Block)
    assert [type(entry.value) for entry in block.entries] == [tree.UnreadValue]
