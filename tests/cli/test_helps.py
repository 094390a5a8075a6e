"""Each help of a bad job that names a setting is followed to the letter: its diagnostic is gone, and none comes in its
place whose own help leads back to it.

A setting is what stands in backquotes as `name = value`; those joined by "with" or "and" belong together. A value that
leaves something to the reader (an ellipsis, `module:function`) is not tried.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.paths import TESTS

from dslc.dsl.diagnostics import Diagnostic
from dslc.dsl.language.registry import BLOCKS, CALLS, fields
from dslc.jobs.check_job import check_one

JOBS = sorted((TESTS / "bad").glob("*.plt"))
# Their helps are followed within some seconds; those of the others that show only in tracing take minutes.
QUICK = (
    "loss_with_buffer",
    "loss_with_parameters",
    "stream_interleaved",
    "stream_of_fewer_shards",
    "stream_over_ranks",
    "structures_in_a_list",
)
TRACED = [
    path if path.stem in QUICK else pytest.param(path, marks=pytest.mark.long)
    for path in sorted((TESTS / "bad" / "traced").glob("*.plt"))
]
SETTING = r"`([\w.]+) = ([^`]+)`"
GROUP = re.compile(f"{SETTING}((?: (?:with|and) {SETTING})*)")
OPEN = ("…", "<", "module:function", "True")  # `True` is Python's
ARGUMENTS = {word: {f.word for f in fields(call)} for calls in CALLS.values() for word, call in calls.items()}
Setting = tuple[str, str]
JOB = "helps.plt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(TESTS / "bad", tmp_path_factory.mktemp("helps") / "bad", symlinks=True))


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS, ids=lambda path: path.stem)
def test_a_help_followed_to_the_letter_helps(job: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    follow(folder / JOB, job.read_text())


@pytest.mark.parametrize("job", TRACED, ids=lambda path: path.stem)
@pytest.mark.usefixtures("loaded")
def test_a_help_for_what_tracing_shows_helps(job: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / "traced")
    followed = follow(folder / "traced" / JOB, job.read_text(), trace=True)
    assert followed or job.stem not in QUICK


def follow(path: Path, text: str, *, trace: bool = False) -> int:
    """Returns the number of helps that were followed. Raises AssertionError for one that does not help."""
    before, count = found(path, text, (), trace), 0
    counts = Counter(each.code for each in before)
    for diagnostic in before:
        if diagnostic.span is not None and not diagnostic.span.source.name.endswith(".plt"):
            continue  # a catalogue
        for group in groups(diagnostic.help):
            told = f"{diagnostic.code} {diagnostic.message}\nhelp: {diagnostic.help}\nfollowed: {group}"
            changed, settings = applied(text, diagnostic, group)
            after = found(path, changed, settings, trace)
            codes = Counter(each.code for each in after)
            others = [each for each in after if (each.code, each.help) == (diagnostic.code, diagnostic.help)]
            assert not others if trace else codes[diagnostic.code] < counts[diagnostic.code], (
                f"{told}\nstays\n{changed}"
            )
            others = [each for each in after if each.severity == "error" and each.code not in counts]
            assert not [each.message for each in others if each.code < "E02"], f"{told}\nis no setting"
            for other in others:
                for back in groups(other.help):
                    again, more = applied(changed, other, back)
                    circle = {each.code for each in found(path, again, (*settings, *more), trace)}
                    assert diagnostic.code not in circle, f"{told}\nthen {other.code}: {other.help}\nand back"
            count += 1
    return count


def found(path: Path, text: str, settings: tuple[str, ...], trace: bool) -> list[Diagnostic]:
    path.write_text(text)
    return list(check_one(path.name, list(settings), trace=trace)[0])


def groups(help: str) -> Iterator[list[Setting]]:
    """Yields the settings of a help that belong together."""
    if help.startswith("no change of"):  # the best of what is not enough
        return
    for match in GROUP.finditer(help):
        group = [(name, value) for name, value in re.findall(SETTING, match[0])]
        part = help[: match.start()].endswith(", and ")  # of a change in words
        if not part and not any(sign in value for _, value in group for sign in OPEN):
            yield group


def applied(text: str, diagnostic: Diagnostic, group: list[Setting]) -> tuple[str, tuple[str, ...]]:
    """Returns the text and the `--set`s of the job in which these settings are made."""
    settings = []
    if diagnostic.help.startswith("write") and diagnostic.span is not None:  # in the place of the marked entry
        start = text.rindex("\n", 0, diagnostic.span.start) + 1
        text = text[:start] + text[text.index("\n", start) :]
    for name, value in group:
        changed = in_call(text, diagnostic, name, value)
        of_block = any(name in {field.word for field in fields(block)} for block in BLOCKS.values())
        if changed is None and not of_block and re.search(rf"\b{name} = ", text):  # of a call elsewhere
            text = re.sub(rf"\b{name} = [^,)\n]*", f"{name} = {value}", text, count=1)
        elif changed is None:
            settings.append(f"{path_of(name, diagnostic)}={value}")
        else:
            text = changed
    return text, tuple(settings)


def path_of(name: str, diagnostic: Diagnostic) -> str:
    """Returns the path of a field: of the only block that has it or of the diagnostic's, else of the source."""
    if "." in name:
        return name
    blocks = [word for word, block in BLOCKS.items() if name in {field.word for field in fields(block)}]
    of_source = re.search(f"`{name} = [^`]*` of the source", diagnostic.help)
    if diagnostic.span is not None and not of_source:  # perhaps in a file that is imported
        text = diagnostic.span.source.text
        for start in calls_at(text, diagnostic.span.start):
            field = re.search(r"(\w+) *= *(\w+)$", text[:start])
            if field is not None and name in ARGUMENTS.get(field[2], ()):
                return f"{block_at(text, start)}.{field[1]}.{name}"
        if len(blocks) > 1:
            blocks = [block_at(text, diagnostic.span.start)]
    return f"{blocks[0] if blocks else 'data.source'}.{name}"


def block_at(text: str, place: int) -> str:
    return str(re.findall(r"^(\w+) \{", text[:place], re.MULTILINE)[-1])


def in_call(text: str, diagnostic: Diagnostic, name: str, value: str) -> str | None:
    """Returns the text with an argument set in the call at the diagnostic's place; None if no call there takes it."""
    span = diagnostic.span
    if re.search(f"`{name} = [^`]*` there", diagnostic.help):
        span = diagnostic.notes[0].span
    of_source = re.search(f"`{name} = [^`]*` of the source", diagnostic.help)
    if of_source or span is None or span.source.name != JOB:
        return None
    for start in calls_at(text, span.start):
        word = re.search(r"\w+$", text[:start])
        if word is None or name not in ARGUMENTS.get(word[0], ()):
            continue
        stop = end_of(text, start)
        inside, depth = text[start + 1 : stop], 0
        for match in re.finditer(rf"[(\[]|[)\]]|\b{name} *= *", inside):
            depth += (match[0] in "([") - (match[0] in ")]")
            if depth == 0 and match[0].endswith(("=", " ")):
                old = re.match(r"[^,()\[\]]*(?:[(\[].*?[)\]])?", inside[match.end() :])
                assert old is not None
                made = inside[: match.end()] + value + inside[match.end() + old.end() :]
                return text[: start + 1] + made + text[stop:]
        comma = ", " if inside.strip() else ""
        return f"{text[: start + 1]}{name} = {value}{comma}{inside}{text[stop:]}"
    return None


def calls_at(text: str, place: int) -> Iterator[int]:
    """Yields the opening brackets of the calls at a place, the innermost first."""
    begins = re.compile(r"\w+\(").match(text, place)
    if begins is not None:
        yield begins.end() - 1
    depth = 0
    for n in range(place - 1, -1, -1):
        depth += (text[n] in ")]") - (text[n] in "([")
        if depth < 0:
            depth = 0
            if text[n] == "(":
                yield n


def end_of(text: str, start: int) -> int:
    depth = 0
    for n in range(start, len(text)):
        depth += (text[n] in "([") - (text[n] in ")]")
        if depth == 0:
            return n
    raise AssertionError(text[start:])


def test_helps_are_followed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the test above follows some."""
    monkeypatch.chdir(folder)
    assert sum(follow(folder / JOB, job.read_text()) for job in JOBS[::3]) >= 15
