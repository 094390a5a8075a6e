"""A user's own functions are tried before a training begins, and what is wrong with one is said at its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.paths import EXAMPLES, HELPERS

from dslc.front import check_one
from dslc.main import main
from dslc.probe.unseen import unseen

METRICS = HELPERS / "own_metrics.py"
RATES = """
import random

def half(step, steps, power=1):
    return (1 - step / steps) ** power

def of_the_step_alone(step):
    return 1

def drawn(step, steps):
    return random.random()

def negative(step, steps):
    return -1
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "of_rates.py").write_text(RATES)
    (tmp_path / "own_metrics.py").write_text(METRICS.read_text())
    (tmp_path / "job.plt").write_text((EXAMPLES / "digits.plt").read_text())
    monkeypatch.chdir(tmp_path)
    return "job.plt"


def test_a_schedule_of_ones_own_is_good_where_its_factors_are(job: str) -> None:
    assert not check_one(job, ['train.lr_schedule=python("of_rates:half", power = 2)'], trace=True)[0].found


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("of_the_step_alone", "takes 1 positional argument but 2 were given"),
        ("drawn", "it gives another factor when it is asked for step 0 again"),
        ("negative", "the schedule gives -1 for step 0, and should give a number of at least 0"),
        ("absent", "`of_rates` has no `absent`"),
    ],
)
def test_a_schedule_of_ones_own_is_tried(job: str, name: str, said: str) -> None:
    (error,) = check_one(job, [f'train.lr_schedule=python("of_rates:{name}")'], trace=True)[0].errors
    assert error.code == "E0802" and error.message.startswith(f"`of_rates:{name}` cannot be used as a schedule")
    assert said in error.message


def test_a_metric_of_ones_own_is_good_where_its_states_add_up(job: str) -> None:
    metrics = '[loss, python("own_metrics:Spread", name = "spread"), python("own_metrics:f1")]'
    assert not check_one(job, [f"evaluate.metrics={metrics}"], trace=True)[0].found


@pytest.mark.parametrize(("name", "said"), [("spread.seen", ""), ("spread.sen", "spread.seen"), ("spread", "spread.")])
def test_a_goal_finds_its_number_in_a_metric_of_ones_own(job: str, name: str, said: str) -> None:
    metrics = 'evaluate.metrics=[python("own_metrics:Spread", name = "spread")]'
    found = check_one(job, [metrics, f'train.early_stopping=highest("{name}")'], trace=True)[0].found
    assert [error.code for error in found] == ["E0317"] * bool(said)
    assert all(said in error.help for error in found)


def test_a_metric_of_ones_own_is_tried(job: str) -> None:
    (error,) = check_one(job, ['evaluate.metrics=[python("own_metrics:not_additive")]'], trace=True)[0].errors
    assert error.code == "E0802" and "put together from two pieces" in error.message
    assert error.message.startswith("`own_metrics:not_additive` cannot be used as a metric")


def test_a_plan_without_what_an_optimizer_keeps_says_so(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--set", 'train.optimizer=python("lion:Lion", lr = 1e-4)']
    assert main(["plan", job, *settings]) == 0
    told = capsys.readouterr()
    assert "warning[W0613]: the memory is shown without what `lion:Lion` keeps" in told.err
    assert "lion:Lion" in told.out and "optimizer 0" not in told.out
    analysis = check_one(job, settings[1:])[1]
    assert analysis is not None
    assert unseen(analysis, trace=False) == " as far as can be seen without its optimizer (`--trace` looks at it)"


def test_a_check_that_calls_nothing_says_what_it_has_not_seen(job: str) -> None:
    report, analysis = check_one(job, ['evaluate.metrics=[python("own_metrics:absent")]'])
    assert not report.found and analysis is not None
    assert unseen(analysis, trace=False) == " as far as can be seen without its metrics (`--trace` looks at it)"
