"""Each fix of a bad job is made: its diagnostic is gone, and none comes in its place whose own fix leads back to it.

A help that names no fix has a reason in `WITHOUT`: it leaves something to the reader. `UPDATE_GOLDEN=1` writes the
counts into tests/bad/fixes.txt.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from helpers.paths import TESTS

from dslc.dsl.diagnostics import Diagnostic
from dslc.dsl.editor.edits import apply_fix
from dslc.dsl.remedy import Fix
from dslc.jobs.check_job import check_one

JOBS = sorted((TESTS / "bad").glob("*.plt"))
# Their fixes are made within some seconds; those of the others that show only in tracing take minutes.
QUICK = (
    "loss_with_buffer",
    "loss_with_parameters",
    "stream_interleaved",
    "stream_of_fewer_shards",
    "stream_over_ranks",
)
TRACED = [
    path if path.stem in QUICK else pytest.param(path, marks=pytest.mark.long)
    for path in sorted((TESTS / "bad" / "traced").glob("*.plt"))
]
JOB = "helps.plt"
COUNTS = TESTS / "bad" / "fixes.txt"

CHOICE = "the reader chooses the value"
NETWORK = "the network has to be another, in its layers or in the user's code"
DATA = "the data has to be another, on the disk or in the user's code"
COMMAND = "the help is a command"
EXPLAINED = "the help explains, or lists what there is"
IMPORTED = "the call to change is in a file that the job imports"
WITHOUT = {
    "E0106": CHOICE,
    "E0107": EXPLAINED,
    "E0113": CHOICE,
    "E0120": CHOICE,
    "E0121": CHOICE,
    "E0130": EXPLAINED,
    "E0131": EXPLAINED,
    "E0138": CHOICE,
    "E0201": NETWORK,
    "E0223": CHOICE,
    "E0226": NETWORK,
    "E0227": NETWORK,
    "E0228": NETWORK,
    "E0230": NETWORK,
    "E0305": CHOICE,
    "E0311": DATA,
    "E0314": CHOICE,
    "E0316": CHOICE,
    "E0318": DATA,
    "E0324": NETWORK,
    "E0327": CHOICE,
    "E0328": CHOICE,
    "E0329": CHOICE,
    "E0335": CHOICE,
    "E0354": CHOICE,
    "E0355": CHOICE,
    "E0410": CHOICE,
    "E0415": CHOICE,
    "E0419": CHOICE,
    "E0421": DATA,
    "E0426": CHOICE,
    "E0432": CHOICE,
    "E0490": CHOICE,
    "E0491": COMMAND,
    "E0492": CHOICE,
    "E0493": CHOICE,
    "E0501": EXPLAINED,
    "E0502": EXPLAINED,
    "E0509": EXPLAINED,
    "E0666": CHOICE,
    "E0711": CHOICE,
    "E0724": CHOICE,
    "E0725": CHOICE,
    "E0726": EXPLAINED,
    "E0727": CHOICE,
    "E0731": CHOICE,
    "E0813": CHOICE,
    "E0816": CHOICE,
    "E0827": CHOICE,
    "E0835": CHOICE,
    "W0309": DATA,
    "W0327": DATA,
    "W0436": COMMAND,
    "W0494": COMMAND,
    "W0503": DATA,
    "W0606": NETWORK,
    "W0614": COMMAND,
    "W0620": COMMAND,
    "W0660": CHOICE,
    "W0712": DATA,
    "W0714": NETWORK,
    "W0806": COMMAND,
    "W0808": EXPLAINED,
    "W0812": CHOICE,
    "W0815": CHOICE,
}
_unfixed: list[tuple[str, str]] = []  # code and help of each mistake without a fix


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(TESTS / "bad", tmp_path_factory.mktemp("helps") / "bad", symlinks=True))


@pytest.mark.slow
def test_each_fix_corrects_its_mistake(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    counts: Counter[str] = Counter()
    for job in JOBS:
        counts += make_fixes(folder / JOB, job.read_text())
    unused = WITHOUT.keys() - {code for code, _ in _unfixed}
    assert not unused, f"each help of these codes names a fix: {sorted(unused)}"
    text = "".join(f"{counts[what]:4} {what}\n" for what in sorted(counts, key=lambda what: (-counts[what], what)))
    if os.environ.get("UPDATE_GOLDEN"):
        COUNTS.write_text(text)
    assert text == COUNTS.read_text()


@pytest.mark.parametrize("job", TRACED, ids=lambda path: path.stem)
@pytest.mark.usefixtures("loaded")
def test_each_fix_corrects_what_tracing_shows(job: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / "traced")
    counts = make_fixes(folder / "traced" / JOB, job.read_text(), trace=True)
    assert job.stem not in QUICK or any(what.startswith("fix:") for what in counts)


def test_fixes_are_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes those of some jobs, each time."""
    monkeypatch.chdir(folder)
    counts: Counter[str] = Counter()
    for job in JOBS[::5]:
        counts += make_fixes(folder / JOB, job.read_text())
    assert sum(count for what, count in counts.items() if what.startswith("fix:")) >= 20, counts


def make_fixes(path: Path, text: str, *, trace: bool = False) -> Counter[str]:
    """Counts the mistakes of a job by what their fixes did, or by why they have none."""
    before, outcomes = diagnostics_of(path, text, trace), Counter[str]()
    codes = {diagnostic.code for diagnostic in before}
    for diagnostic in before:
        if diagnostic.span is not None and diagnostic.span.source.name != path.name:
            continue  # a catalogue, or the file that is imported
        outcome = "no help" if not diagnostic.help else ""
        for fix in diagnostic.fixes:
            outcome = make_fix(path, text, diagnostic, fix, before, trace) or outcome
            if outcome:
                break
        outcomes[outcome or f"no fix: {reason(diagnostic, trace)}"] += 1
        for fix in diagnostic.fixes[1:]:
            make_fix(path, text, diagnostic, fix, before, trace)
    assert codes == {diagnostic.code for diagnostic in before}
    return outcomes


def reason(diagnostic: Diagnostic, trace: bool) -> str:
    if diagnostic.fixes:
        return IMPORTED
    if trace:
        return NETWORK
    _unfixed.append((diagnostic.code, diagnostic.help))
    assert diagnostic.code in WITHOUT, f"{diagnostic.code} {diagnostic.message}\nhelp: {diagnostic.help}"
    return WITHOUT[diagnostic.code]


def make_fix(path: Path, text: str, diagnostic: Diagnostic, fix: Fix, before: list[Diagnostic], trace: bool) -> str:
    """Returns what a fix led to; "" if it cannot be made in this file. Raises AssertionError if it does not help."""
    changed = apply_fix(text, path.name, fix)
    if changed is None:
        return ""
    shown = f"{diagnostic.code} {diagnostic.message}\nhelp: {diagnostic.help}\nfix: {fix.title}\n{changed}"
    after = diagnostics_of(path, changed, trace)
    assert count(diagnostic, after) < count(diagnostic, before), f"{shown}\nand it stays"
    codes = {other.code for other in before}
    errors = [other for other in after if other.severity == "error"]
    new = [other for other in errors if other.code not in codes]
    assert not [other.message for other in new if other.code < "E01"], f"{shown}\nwhich is no job"
    for other in new:
        for back in other.fixes:
            circle = apply_fix(changed, path.name, back)
            assert circle != text, f"{shown}\nthen {other.code}: {other.help}\nand back"
    return "fix: the job is accepted" if not errors else "fix: the next mistake is another one"


def count(diagnostic: Diagnostic, diagnostics: list[Diagnostic]) -> int:
    return sum((other.code, other.message) == (diagnostic.code, diagnostic.message) for other in diagnostics)


def diagnostics_of(path: Path, text: str, trace: bool) -> list[Diagnostic]:
    path.write_text(text)
    return list(check_one(path.name, [], trace=trace)[0])
