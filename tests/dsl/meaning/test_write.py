"""The job as resolved reads back as the same job, laid out as `dslc fmt` would."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.paths import ROOT
from hypothesis import HealthCheck, example, given, settings

from dslc.dsl.diagnostics import Report
from dslc.dsl.language.job import JobSpec
from dslc.dsl.meaning.load import load, load_text
from dslc.dsl.meaning.write import anchored, write
from dslc.dsl.source import Source
from dslc.dsl.syntax.format import format_document
from dslc.dsl.syntax.parser import parse
from dslc.testing.registry_strategies import job_specs, job_texts

EXAMPLES = sorted((ROOT / "examples").glob("*.plt"))
drawn = settings(max_examples=60, suppress_health_check=list(HealthCheck))


def read(text: str, job: JobSpec) -> JobSpec:
    loaded = load_text(text, f"{job.name}.plt", job.folder)
    assert not loaded.report, [d.message for d in loaded.report]
    assert loaded.job is not None
    return loaded.job


@pytest.mark.slow
@drawn
@given(job_texts())
def test_a_drawn_job_loads_without_a_mistake(text: str) -> None:
    loaded = load_text(text)
    assert not loaded.report.errors, (text, [d.message for d in loaded.report.errors])
    assert loaded.job is not None and not loaded.broken


def looks_at(metric: str) -> JobSpec:
    text = """
model { network = [linear(1)], loss = mse() }
data { source = synthetic(shape = [2], targets = [1]), batch = 8, validation = 20% }
evaluate { every = 2 steps }
train { steps = 4, optimizer = sgd(), early_stopping = lowest("METRIC") }
"""
    job = load_text(text.replace("METRIC", metric)).job
    assert job is not None
    return job


@pytest.mark.parametrize("name", ["NULL", "None", "nil", "True", "none", "true"])
def test_a_name_that_is_a_literal_elsewhere_is_quoted(name: str) -> None:
    job = looks_at(name)
    assert f'"{name}"' in write(job)
    assert read(write(job), job) == job


@pytest.mark.slow
@drawn
@given(job_specs())
@example(looks_at("NULL"))
def test_what_is_written_reads_back_as_the_same_job(job: JobSpec) -> None:
    loaded = load_text(write(job), f"{job.name}.plt", job.folder)
    assert not loaded.report.errors, [d.message for d in loaded.report]
    assert loaded.job == job


@pytest.mark.slow
@drawn
@given(job_specs())
def test_what_is_written_is_laid_out(job: JobSpec) -> None:
    text = write(job)
    document = parse(Source("job.plt", text), Report())
    assert document is not None
    assert format_document(document) == text


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_are_written_without_a_warning(path: Path) -> None:
    job = load(str(path)).job
    assert job is not None
    assert read(write(job), job) == replace(job, sweep={})
    assert write(read(write(job), job)) == write(job)


JOB = """
param speed = 0.1
model {
  network = [conv2d(4), flatten(), linear(10)]
  loss    = cross_entropy
}
data {
  source = text("corpus.txt")
  batch  = 8
}
train {
  steps     = 4 * 25
  optimizer = sgd(speed / 2)
}
memory {
  limit = 1.5GiB
}
expect {
  step_time < 1.5s
}
"""


def test_params_settings_and_relative_paths_are_resolved_away(tmp_path: Path) -> None:
    job = load_text(JOB, folder=str(tmp_path), settings=["speed=0.4", "train.clip=1"]).job
    assert job is not None
    text = write(job)
    assert text.startswith("language = 1\n")
    assert "speed" not in text
    assert f'file = "{tmp_path}/corpus.txt"' in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "lr = 0.2" in text
    for line in ("clip = 1.0", "steps = 100 steps", "limit = 1536MiB"):
        assert line in lines, line
    assert "step_time < 1500ms" in text
    assert read(text, job) == job


def test_a_block_set_as_a_whole_is_written_as_one() -> None:
    job = load_text(JOB, settings=["parallelism=auto"]).job
    assert job is not None
    assert "parallelism = auto\n" in write(job)
    assert "microbatches" not in write(job)


def test_in_another_folder_what_lay_beside_the_job_is_named_with_its_folder(tmp_path: Path) -> None:
    for name in ("mine.py", "pkg/nets.py", "lib/data.py", "tiny/config.json", "gpt2.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    text = """
        model { network = NETWORK, loss = python("mine:loss") }
        data { source = python("lib/data:pair", size = 3), batch = 4 }
        train { steps = 1, optimizer = sgd(lr = 0.1) }
    """
    for network, found in (
        ('python("pkg.nets:Net.make")', f"{tmp_path}/pkg.nets:Net.make"),
        ('python("elsewhere.nets:make")', "elsewhere.nets:make"),
        ('transformers("tiny")', f"{tmp_path}/tiny"),
        ('transformers("gpt2")', "gpt2"),
    ):
        job = load_text(text.replace("NETWORK", network), folder=str(tmp_path)).job
        assert job is not None
        written = write(anchored(job))
        assert [f'"{name}"' in written for name in (found, f"{tmp_path}/mine:loss", f"{tmp_path}/lib/data:pair")] == [
            True
        ] * 3
