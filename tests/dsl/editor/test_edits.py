"""Fixes in the text of a job: only the named part changes, and comments and layout stay."""

from __future__ import annotations

import random

import pytest
from helpers.paths import ROOT

from dslc.dsl.diagnostics import Report
from dslc.dsl.editor.edits import apply_fix, text_edits
from dslc.dsl.language.registry import BLOCKS, fields
from dslc.dsl.remedy import (
    Edit,
    Fix,
    join_edits,
    join_remedies,
    remedy,
    remove_argument,
    remove_at,
    remove_field,
    replace_text,
    set_argument,
    set_field,
)
from dslc.dsl.source import Source, Span
from dslc.dsl.syntax import tree
from dslc.dsl.syntax.format import format_document
from dslc.dsl.syntax.parser import parse

NAME = "job.plt"
JOB = """\
# A job.
param width = 64

model {
  network = [linear(width), linear(10)]
  loss    = cross_entropy  # of classes
}

data { source = digits(), batch = 64 }

train {
  steps     = 10
  optimizer = sgd(
    lr = 0.1,  # large
  )
}
"""


def place(text: str, within: str = JOB, start: int = 0) -> Span:
    at = within.index(text, start)
    return Span(Source(NAME, within), at, at + len(text))


def made(edit: Edit | str | Fix, text: str = JOB) -> str | None:
    assert not isinstance(edit, str)
    return apply_fix(text, NAME, edit if isinstance(edit, Fix) else Fix((edit,), edit.text))


@pytest.mark.parametrize(
    "edit, old, new",
    [
        (set_field("data.batch", 32), "batch = 64", "batch = 32"),
        (set_field("data.validation", "10%"), "batch = 64 }", "batch = 64, validation = 10% }"),
        (set_field("train.steps", "20"), "= 10\n", "= 20\n"),
        (set_field("train.clip", "1"), "\n  )\n}\n", "\n  )\n  clip = 1\n}\n"),
        (set_field("train.optimizer.lr", "0.2"), "lr = 0.1", "lr = 0.2"),
        (set_field("train.optimizer.momentum", "0.9"), "lr = 0.1,", "lr = 0.1, momentum = 0.9,"),
        (set_field("model.loss.label_smoothing", "0.1"), "cross_entropy ", "cross_entropy(label_smoothing = 0.1) "),
        (set_field("width", "32"), "width = 64", "width = 32"),
        (set_field("devices.cpus", "2"), " }\n\ntrain", " }\n\ndevices {\n  cpus = 2\n}\n\ntrain"),
        (set_field("parallelism", "auto"), " }\n\ntrain", " }\n\nparallelism = auto\n\ntrain"),
        (remove_field("data.batch"), "digits(), batch = 64", "digits()"),
        (remove_field("data.source"), "source = digits(), ", ""),
        (remove_field("model.loss"), "  loss    = cross_entropy  # of classes\n", ""),
        (remove_field("train.clip"), "\n  )\n}\n", "\n  )\n  clip = none\n}\n"),
        (set_argument(place("linear(width)"), "bias", "false"), "linear(width)", "linear(width, bias = false)"),
        (remove_argument(place("sgd"), "lr"), "(\n    lr = 0.1,", "(\n    "),
        (replace_text(place("digits"), "mnist"), "digits()", "mnist()"),
        (remove_at(place("linear(10)")), ", linear(10)", ""),
        (remove_at(place("param width = 64")), "param width = 64\n", ""),
        (remove_at(place("model")), JOB[JOB.index("model") : JOB.index("data {")], ""),
    ],
)  # fmt: skip
def test_an_edit_changes_what_it_names(edit: Edit, old: str, new: str) -> None:
    text = made(edit)
    assert JOB.count(old) == 1
    assert text == JOB.replace(old, new)


def test_a_job_out_of_layout_keeps_its_own() -> None:
    text = "data{batch=64 # of all\n\n      source=digits()}\n"
    assert made(set_field("data.batch", 32), text) == text.replace("64", "32")
    crowded = "data {\n   batch=64\n   source=digits()   # all\n}"
    assert made(set_field("data.test", "10%"), crowded) == crowded.replace("# all\n", "# all\n   test = 10%\n")


def test_a_param_that_one_field_uses_is_changed_itself() -> None:
    text = "param width = 64\nparam batch = width\n\ndata {\n  batch = batch\n}\n"
    assert made(set_field("data.batch", 32), text) == text.replace("param batch = width", "param batch = 32")
    used_twice = "param n = 64\n\ndata {\n  batch = n\n}\n\nevaluate {\n  batch = n\n}\n"
    assert made(set_field("data.batch", 32), used_twice) == used_twice.replace("batch = n", "batch = 32", 1)


def test_an_edit_that_cannot_be_made_here_is_none() -> None:
    assert made(remove_field("log")) is None, "nothing to remove"
    assert made(set_field("memory.offload.kind", "1")) is None, "no call is written here"
    assert made(set_field("a.b.c.d", "1")) is None
    swept = JOB + "\nsweep {\n  data.batch = [32, 64]\n}\n"
    assert made(set_field("data.batch", 16), swept) is None, "the sweep gives the value"
    other = Span(Source("base.plt", JOB), 0, 1)
    assert made(replace_text(other, "x")) is None, "another file"
    assert made(replace_text(Span(Source(NAME, "old text"), 0, 1), "x")) is None, "an older version of the text"
    assert made(set_field("data.batch", 64)) is None, "it changes nothing"
    assert made(set_field("parallelism.data", 2), "parallelism = auto\n") is None, "the whole block is set"
    assert made(Fix((replace_text(place("digits"), "a"), replace_text(place("digits()"), "b")), "")) is None  # type: ignore[arg-type]


def test_a_fix_of_several_edits_is_made_as_a_whole() -> None:
    fix = join_edits(set_field("model.network", "llama()"), " with ", set_field("data.batch", 32))
    text = made(fix)
    assert text is not None and "network = llama()" in text and "batch = 32" in text
    assert fix.text == "`network = llama()` with `batch = 32`"
    assert fix.title == "set `model.network` to `llama()` and set `data.batch` to `32`"
    assert made(join_edits(set_field("data.batch", 32), set_field("a.b.c", 1))) is None
    added = made(join_edits(set_field("train.clip", 1), set_field("train.ema", 0.9)))
    assert added is not None and added.index("clip") < added.index("ema")


def test_a_remedy_has_the_text_of_its_parts_and_their_fixes() -> None:
    text = remedy("use ", set_field("data.batch", 32, "32"), ", or ", remove_field("data.test"))
    assert text == "use 32, or leave `test` out"
    assert [fix.title for fix in text.fixes] == ["set `data.batch` to `32`", "remove `data.test`"]
    both = join_remedies(", or ", [text, "fewer ranks", remedy(replace_text(None, "x"))])
    assert both == "use 32, or leave `test` out, or fewer ranks, or `x`"
    assert both.fixes == text.fixes, "plain text has none, nor has a place that is in no file"


def test_text_edits_make_the_new_text() -> None:
    new = made(join_edits(set_field("data.test", "10%"), remove_field("model.loss"), set_field("devices.cpus", 2)))
    assert new is not None
    text = JOB
    edits = text_edits(JOB, new)
    for edit in reversed(edits):
        text = text[: edit.start] + edit.text + text[edit.end :]
    assert text == new
    assert sum(edit.end - edit.start for edit in edits) < len(JOB) / 2, "they leave the rest alone"


@pytest.mark.parametrize("job", sorted((ROOT / "examples").glob("*.plt")), ids=lambda path: path.stem)
def test_any_field_of_an_example_can_be_set_and_removed(job: object) -> None:
    from pathlib import Path

    assert isinstance(job, Path)
    text = job.read_text()
    draw = random.Random(job.stem)
    paths = [f"{word}.{field.word}" for word, block in BLOCKS.items() for field in fields(block)]
    for path in draw.sample(paths, 12):
        after = made(set_field(path, "17"), text)
        if after is None:
            continue
        document = parsed(after)
        assert document is not None, after
        assert comments(document) == comments(parsed(text))
        assert format_document(document) == after
        block, field = path.split(".")
        assert f"{field}" in after and entries(document)[block, field] == "17"
        removed = made(remove_field(path), after)
        assert removed is not None and (block, field) not in entries(parsed(removed))


def parsed(text: str) -> tree.Document:
    report = Report()
    document = parse(Source(NAME, text), report)
    assert document is not None and not report.errors, (text, [d.message for d in report])
    return document


def comments(document: tree.Document) -> list[str]:
    return sorted(comment.text for comment in document.comments)


def entries(document: tree.Document) -> dict[tuple[str, str], str]:
    return {
        (block.name, entry.path[0]): entry.value.span.text()
        for block in document.statements
        if isinstance(block, tree.Block)
        for entry in block.entries
        if isinstance(entry, tree.Entry)
    }


def test_a_title_says_what_changes() -> None:
    for edit, title in (
        (replace_text(place("digits()"), "mnist()"), "replace `digits()` by `mnist()`"),
        (remove_at(place("loss    = cross_entropy")), "remove `loss = cross_entropy`"),
        (set_field("data.batch", 32), "set `data.batch` to `32`"),
        (remove_field("data.batch"), "remove `data.batch`"),
    ):
        assert isinstance(edit, Edit) and edit.title == title
