"""What a loss of the user's own draws follows from the sample: the curve of one process, on every plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.launcher import Launcher
from helpers.trained import agree, ready, train, train_job, write_job_with_helper

from dslc.jobs.check_job import check_one

JOB = """
model {{ network = mlp(widths = [16, 16]), loss = python("own_loss_draws:{loss}"{more}) }}
data  {{ source = digits(), batch = 8, validation = 5% }}
devices {{ cpus = 1 }}
train {{ steps = 4, optimizer = sgd(lr = 0.05) }}
evaluate {{ every = 2 steps }}
log   {{ every = 1 step }}
"""
TOKENS = (
    "model.network=gpt(layers = 1, width = 16, heads = 2, context = 8, vocab = 256)",
    "data.source=synthetic(samples = 90, vocab = 256, context = 8)",
)
TWO = "devices.cpus=2"
PARTS = "parallelism.microbatches=2"


def job_of(folder: Path, loss: str, more: str = "") -> Path:
    return write_job_with_helper("own_loss_draws.py", folder, JOB.format(loss=loss, more=more))


def codes_of(job: Path, *settings: str) -> dict[str, str]:
    return {
        each.code: f"{each.message}: {each.label}"
        for each in check_one(str(job), [TWO, *settings], trace=True)[0].found
    }


@pytest.mark.parametrize(
    ("loss", "more", "plans"),
    [
        ("noisy", "", [("parallelism.zero=3", PARTS), ("parallelism.pipeline=2", PARTS)]),
        pytest.param("noisy_mean", "", [(PARTS,)], marks=pytest.mark.slow),
        ("against_others", ", over = all", [(PARTS,)]),
    ],
)
def test_a_loss_draws_what_one_process_draws(
    launcher: Launcher, tmp_path: Path, loss: str, more: str, plans: list[tuple[str, ...]]
) -> None:
    job = job_of(tmp_path, loss, more)
    assert "W0608" not in codes_of(job)
    one = train_job(launcher, job)
    assert len(one.losses("validation")) == 2
    for plan in plans:
        agree(one, train_job(launcher, job, TWO, *plan))


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        ("mixup", "it orders the samples of a batch"),
        ("backwards", "draws other numbers for its samples than a pass over all"),
    ],
)
def test_draws_that_nothing_controls_are_warned_of_with_their_line(tmp_path: Path, loss: str, text: str) -> None:
    job = job_of(tmp_path, loss)
    warning = codes_of(job)["W0608"]
    lines = (tmp_path / "own_loss_draws.py").read_text().splitlines()
    (line,) = [n for n, text_of_line in enumerate(lines, 1) if text_of_line.endswith(f"# {loss}")]
    assert f"(own_loss_draws.py:{line}), different ones on each rank" in warning
    assert text in warning


def test_a_loss_that_draws_and_compares_samples_is_warned_of_both(tmp_path: Path) -> None:
    codes = codes_of(job_of(tmp_path, "against_others"), "train.dropout_generator=torch")
    assert {"W0608", "W0625"} <= {*codes}
    assert "`train.dropout_generator` is `torch`" in codes["W0608"]


@pytest.mark.slow
def test_a_rank_of_the_context_axis_draws_the_numbers_of_its_positions(launcher: Launcher, tmp_path: Path) -> None:
    job = job_of(tmp_path, "noisy_tokens")
    one = train_job(launcher, job, *TOKENS)
    context = (*TOKENS, "parallelism.context=2")
    assert "W0608" not in codes_of(job, *context)
    agree(one, train_job(launcher, job, *context, TWO))
    agree(one, train_job(launcher, job, *context, "devices.cpus=4", "parallelism.data=2", PARTS))
    warning = codes_of(job_of(tmp_path, "turned_tokens"), *context)["W0608"]
    assert "no trial tells its part of the numbers" in warning


@pytest.mark.slow
def test_a_training_that_resumes_on_other_ranks_goes_on_with_the_next_numbers(
    launcher: Launcher, tmp_path: Path
) -> None:
    job, place = job_of(tmp_path, "noisy"), tmp_path / "run"
    one = train_job(launcher, job)
    for steps, settings in (("2", (TWO,)), ("4", (PARTS,))):
        made = ready(job, f"train.steps={steps}", "checkpoint.every=2 steps", "checkpoint.resume=auto", *settings)
        place.mkdir(exist_ok=True)
        end = train(launcher, place, made.program, made.places)
    assert end.losses() == pytest.approx(one.losses(), abs=1e-5)
