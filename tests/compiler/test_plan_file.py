"""Plan files: read back as they were written, and refused where they were changed."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import EXAMPLES
from helpers.planning import JOBS, compiled

from dslc.compiler.compile import Compiled
from dslc.compiler.emit import emit, places
from dslc.compiler.facts.fingerprint import fingerprints
from dslc.compiler.facts.hardware import GiB
from dslc.compiler.ir.facts import Facts, MachineFacts, SourceFacts
from dslc.compiler.plan_facts import PlanFacts, differences, facts_of
from dslc.compiler.plan_file import PlanFile, PlanFileError, read_plan
from dslc.compiler.show.explain import explain
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load, load_kept
from dslc.dsl.paths import ResolvedPath, portable, resolved
from dslc.jobs.check_job import inspect
from dslc.runs.plan_file_output import file_of

EVERY = sorted(path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.plt"))


def written(path: Path, *settings: str, trace: bool = False) -> tuple[Compiled, PlanFile]:
    """The plan of a job, and its file, as `dslc plan --json` makes it."""
    from dslc.compiler.compile import compile_plan

    loaded, report = load(str(path), settings), Report()
    analysis = inspect(loaded, report, trace=trace)
    assert analysis is not None and not report.errors, report.errors
    made = compile_plan(analysis)
    return made, file_of(made, loaded)


@pytest.mark.processes
@pytest.mark.parametrize("example", EVERY)
def test_a_plan_is_read_as_it_was_written(example: str) -> None:
    made, file = written(EXAMPLES / example, trace=example.startswith("own"))
    text = file.text()
    read = read_plan(text)
    assert read.text() == text and read.plan == made.plan
    assert (read.source, read.facts) == (file.source, file.facts)
    if file.complete:
        assert emit(read.graph, read.plan.hash) == emit(made.graph, made.plan.hash)
        assert dataclasses.replace(made, graph=read.graph).program() == made.program()
    assert places(read.graph)[:100] == places(made.graph)[:100]


@pytest.mark.slow
def test_a_plan_for_16384_devices_is_a_file_of_sane_size() -> None:
    _, file = written(JOBS / "vast.plt")
    assert len(file.text()) < 3_000_000
    assert len(places(read_plan(file.text()).graph)) == 16_384


def test_a_plan_has_no_path_of_the_machine_it_was_made_on() -> None:
    for example in ("tokens.plt", "own/own.plt", "cluster.plt"):
        _, file = written(EXAMPLES / example)
        assert str(EXAMPLES) not in file.text()


# ------------------------------------------------------------------------------------------------------- refusals


def values(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in JSON, with each key of a scalar in it."""
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            if isinstance(value, dict | list):
                yield from values(value)
            else:
                yield data, key


def other(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "x"
        case _:
            return 1


@pytest.fixture(scope="module")
def digits() -> PlanFile:
    return written(EXAMPLES / "digits.plt")[1]


def test_every_value_that_is_changed_is_noticed(digits: PlanFile) -> None:
    data = json.loads(digits.text())
    seen = 0
    for place, key in list(values(data)):
        before = place[key]
        place[key] = other(before)
        with pytest.raises(PlanFileError) as refused:
            read_plan(json.dumps(data))
        assert refused.value.code in ("E1001", "E1002", "E1003"), (key, refused.value)
        place[key] = before
        seen += 1
    assert seen > 300
    read_plan(json.dumps(data))


def test_a_byte_that_is_changed_is_named_as_that(digits: PlanFile) -> None:
    with pytest.raises(PlanFileError, match=f"not those of plan {digits.plan.hash}") as refused:
        read_plan(digits.text().replace('"lr": 0.05', '"lr": 0.9'))
    assert refused.value.code == "E1002"


def test_a_forged_plan_shows_what_it_runs(digits: PlanFile) -> None:
    """Another rate, with a hash and a checksum to it: another plan, and shown as that."""
    forged = read_plan(digits.text())
    forged.graph.change("optimizer", lr=0.9)
    read = read_plan(forged.text())
    assert (emit(read.graph, read.plan.hash).optimizer.lr, read.plan.training.lr) == (0.9, 0.9)
    assert read.plan.hash != digits.plan.hash and re.search(r"learning rate +0\.9 ", explain(read.plan))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"graph": 1, "hash": 2}', "model {}", "\0", '{"graph": {}, "hash": "x", "format": 6}']
)
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanFileError, match="not a plan") as refused:
        read_plan(text)
    assert refused.value.code == "E1001"


def test_an_older_format_is_refused_by_its_number(digits: PlanFile) -> None:
    data = json.loads(digits.text())
    del data["format"]
    with pytest.raises(PlanFileError, match="format 1, and this dslc reads format 6") as refused:
        read_plan(json.dumps(data))
    assert refused.value.code == "E1003"


# ---------------------------------------------------------------------------------------------------------- facts


def gpus(memory: int | None) -> PlanFacts:
    """The facts of a job on two GPUs with so much memory; None: on a machine without them."""
    machine = MachineFacts(cores=4, memory=2**36, gpus=(memory, memory)) if memory else None
    settings = ("devices.gpus=2", "devices.cpus=none", "devices.kind=a10")
    made = compiled(EXAMPLES / "digits.plt", *settings, facts=Facts(machine=machine))
    return facts_of(made.analysis)


def test_other_device_memory_is_a_difference() -> None:
    assert list(differences(gpus(24 * GiB), gpus(24 * GiB))) == []
    (told,) = differences(gpus(24 * GiB), gpus(16 * GiB))
    assert told == f"hardware.memory was {24 * GiB}, and is {16 * GiB}"


def test_a_plan_that_was_made_away_from_the_devices_runs_on_what_they_have() -> None:
    """The catalogue's figure is a nominal one; whether the job fits is for the rules."""
    assert list(differences(gpus(None), gpus(23 * GiB))) == []


def test_a_difference_names_the_fact_with_both_values(digits: PlanFile) -> None:
    facts = digits.facts
    source = dataclasses.replace(facts.source, samples=12, classes=None)
    assert list(differences(facts, dataclasses.replace(facts, source=source))) == [
        "source.classes was 10, and is unknown",
        "source.samples was 1797, and is 12",
    ]
    parts = dataclasses.replace(facts, by_parts=True, source=SourceFacts())
    assert len(list(differences(facts, parts))) > 3


def test_a_fingerprint_is_of_the_whole_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "data.bin"

    def told() -> str:
        (fact,) = fingerprints([str(file)])
        return fact.digest

    content = bytearray(300_000)
    file.write_bytes(content)
    before = told()
    assert told() == before
    for at in (0, 150_000, 299_999):
        content[at] = 1
        file.write_bytes(content)
        assert told() != before
        content[at] = 0
    big = tmp_path / "big.bin"
    with big.open("wb") as stream:
        stream.truncate(2**28)
    (first,) = fingerprints([str(big)])
    with big.open("r+b") as changed:
        changed.seek(2**28 - 1)
        changed.write(b"x")
    (second,) = fingerprints([str(big)])
    assert first.digest != second.digest and first.size == second.size


def test_a_fingerprint_of_a_folder_is_of_the_names_in_it(tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "1.png").write_bytes(b"")
    (before,) = fingerprints([str(tmp_path)])
    (tmp_path / "cats" / "2.png").write_bytes(b"")
    (after,) = fingerprints([str(tmp_path)])
    assert (before.size, after.size) == (1, 2) and before.digest != after.digest


# ---------------------------------------------------------------------------------------------------------- paths


@pytest.mark.parametrize(
    ("path", "text", "kept"),
    [
        ("/jobs/a/data/x", "data/x", "./data/x"),
        ("/jobs/x", "../x", "../x"),
        ("/jobs", "..", "./.."),
        ("/jobs/a/auto", "./auto", "./auto"),
        ("/data/x", "/data/x", "/data/x"),
    ],
)
def test_a_path_is_kept_as_it_was_written_and_found_where_the_job_is(path: str, text: str, kept: str) -> None:
    assert portable(ResolvedPath(path, text), "/jobs/a") == kept
    assert resolved(kept, "/jobs/a") == path
    assert resolved(kept, "/other/b") == (path if text.startswith("/") else path.replace("/jobs/a", "/other/b")) or (
        ".." in kept
    )


def test_a_path_in_the_home_folder_is_of_whoever_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/users/me")
    assert portable(ResolvedPath("/users/me/x", "~/x"), "/jobs") == "~/x"
    monkeypatch.setenv("HOME", "/users/you")
    assert resolved("~/x", "/jobs") == "/users/you/x"


def test_what_a_path_of_the_job_led_to_is_kept_as_that_is() -> None:
    assert portable("/jobs/a/t/1.bin", "/jobs/a", ResolvedPath("/jobs/a/t/*.bin", "t/*.bin")) == "./t/1.bin"
    assert portable("/data/t/1.bin", "/data", ResolvedPath("/data/t/*.bin", "/data/t/*.bin")) == "/data/t/1.bin"


JOB = """
import "../base/base.plt"
param w = 8
model {
  network = gpt(layers = 1, width = w, heads = 1, context = 8, vocab = 256)
  loss    = cross_entropy()
}
train {
  optimizer = sgd(lr = 0.1)
}
"""


def test_a_job_is_loaded_from_the_texts_of_its_files(tmp_path: Path) -> None:
    """Elsewhere, where none of its files are."""
    for folder in ("jobs", "base"):
        (tmp_path / folder).mkdir()
    (tmp_path / "base" / "more.plt").write_text("train {\n  steps = 3\n}\n")
    (tmp_path / "base" / "base.plt").write_text(
        'import "more.plt"\ndata {\n  source = text("x.txt")\n  batch = 4\n}\n', encoding="utf-8"
    )
    (tmp_path / "jobs" / "job.plt").write_text(JOB)
    loaded = load(str(tmp_path / "jobs" / "job.plt"), ["w=16", 'model.weights="w.safetensors"'])
    assert list(loaded.texts) == ["../base/more.plt", "../base/base.plt", "job.plt"]
    again = load_kept(loaded.texts, "/nowhere/jobs/job.plt", loaded.settings, "/nowhere/here")
    assert loaded.job is not None and again.job is not None, (loaded.report.found, again.report.found)
    assert again.job.train.steps == 3
    assert again.job.data.source.file == "/nowhere/base/x.txt"  # type: ignore[attr-defined]
    assert again.job.model.weights == "/nowhere/here/w.safetensors"
    assert (again.texts, again.settings) == (loaded.texts, loaded.settings)
