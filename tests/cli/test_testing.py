"""`dslc.testing`: what the strategies draw, what each assertion says, and how small a failing example becomes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.job_texts import mlp_job_text
from helpers.paths import TESTS
from hypothesis import assume, find, given, settings
from hypothesis import strategies as st

from dslc.dsl.diagnostics import Report
from dslc.dsl.source import Source
from dslc.dsl.syntax.parser import parse
from dslc.testing import (
    JobVariant,
    assert_accepted,
    assert_resumable,
    assert_same_training,
    assert_step_time,
    assert_within_memory,
    assume_accepted,
    draw_plans,
    load_variant,
    networks,
    vary,
)

JOB = f"param width = 32\n\n{mlp_job_text('width')}"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("testing") / "job.plt"
    path.write_text(JOB)
    return str(path)


def values_of(variant: JobVariant) -> dict[str, str]:
    return dict(setting.split("=", 1) for setting in variant.settings)


def test_vary_draws_fields_params_and_paths(job: str) -> None:
    strategy = vary(
        job,
        {"train.optimizer.lr": [0.1, 0.2]},
        cpus=range(1, 5),
        width=st.integers(8, 9),
        zero=(0, 1),
        source=["digits()"],
    )

    @settings(max_examples=20)
    @given(strategy)
    def draw(variant: JobVariant) -> None:
        values = values_of(variant)
        assert values.pop("train.optimizer.lr") in ("0.1", "0.2") and values.pop("devices.cpus") in "1234"
        assert values.pop("width") in "89" and values.pop("parallelism.zero") in "01"
        assert values == {"data.source": "digits()"}

    draw()


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"every": [1]},
            "`every` is `evaluate.every`, `generate.every`, `checkpoint.every` or `log.every`: name the path",
        ),
        ({"bach": [1]}, "no block has a field `bach`, and the job no such param: did you mean `batch`?"),
    ],
)
def test_a_name_that_is_no_single_field_is_explained(job: str, fields: dict[str, list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message.split(":", maxsplit=1)[0]) as raised:
        vary(job, **fields)
    assert str(raised.value).startswith(message)


def test_what_is_no_choice_of_values_is_refused(job: str) -> None:
    refused: tuple[object, ...] = ("text", [], 3, range(0))
    for values in refused:
        with pytest.raises(TypeError, match="neither a strategy nor a range or list"):
            vary(job, batch=values)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`experts` is no axis"):
        draw_plans(job, axes=["experts"])


def test_a_failing_example_is_the_smallest(job: str) -> None:
    found = find(
        vary(job, cpus=range(1, 65), batch=[64, 128, 256], zero=range(4)), lambda variant: bool(variant.errors)
    )
    assert values_of(found) == {"devices.cpus": "3", "data.batch": "64", "parallelism.zero": "0"}
    with pytest.raises(AssertionError) as raised:
        assert_accepted(found)
    shown = str(raised.value)
    assert shown.startswith(f"dslc check {job} --set devices.cpus=3 --set data.batch=64 --set parallelism.zero=0\n\n")
    assert "error[E0301]: a global batch of 64 cannot be shared out over 3 data-parallel ranks" in shown


def test_a_plan_that_breaks_a_property_is_shrunk_to_a_small_one(job: str) -> None:
    baseline = load_variant(job, {"devices.cpus": 1})

    def breaks(variant: JobVariant) -> bool:
        """True for the accepted plans with a rank that holds less than half as much as one process."""
        if variant.errors:
            return False
        peaks = [max(cost.memory.peak for cost in each.analysis.costs) for each in (variant, baseline)]
        return peaks[0] < 0.6 * peaks[1]

    found = values_of(find(draw_plans(job, devices=range(1, 17), axes=["pipeline", "tensor"]), breaks))
    small = {"parallelism.pipeline": "1", "parallelism.tensor": "1", "parallelism.data": found["devices.cpus"]}
    assert found.items() >= small.items() and int(found["devices.cpus"]) <= 4, found
    assert found["parallelism.microbatches"] == "1"


@settings(max_examples=25)
@given(data=st.data())
def test_every_accepted_plan_keeps_the_promises(job: str, data: st.DataObject) -> None:
    variant = data.draw(draw_plans(job, axes=["pipeline"], batch=[64, 128]))
    assume_accepted(variant)
    baseline = load_variant(job, {"devices.cpus": 1, "data.batch": values_of(variant)["data.batch"]})
    assert_same_training(variant, baseline)
    assert_resumable(variant, baseline)
    assert_resumable(baseline, variant)
    assert_within_memory(variant, "1GiB")


def failure(assertion: object, *arguments: object, **named: object) -> str:
    assert callable(assertion)
    with pytest.raises(AssertionError) as raised:
        assertion(*arguments, **named)
    return str(raised.value)


def test_another_training_is_named(job: str) -> None:
    one, other = load_variant(job), load_variant(job, {"data.batch": 32, "train.seed": 7})
    said = failure(assert_same_training, other, one)
    assert "its global batch is 32, and not 64" in said and "its seed is 7, and not 0" in said
    said = failure(assert_resumable, load_variant(job, {"width": 16}), one)
    assert "cannot resume from a checkpoint of" in said and "is of shape" in said
    assert "optimizer" in failure(assert_resumable, load_variant(job, {"train.optimizer": "sgd(lr = 0.1)"}), one)


def test_memory_is_held_against_a_limit(job: str) -> None:
    variant = load_variant(job)
    assert failure(assert_within_memory, variant) == "the memory of `cpu` is not known: name a limit"
    assert_within_memory(load_variant(job, {"memory.limit": "1GiB"}))
    said = failure(assert_within_memory, variant, "1kB")
    assert said.startswith(variant.command) and "over 1000 B" in said
    with pytest.raises(ValueError, match="'much' is no number of bytes"):
        assert_within_memory(variant, "much")


def test_a_step_is_compared_by_its_predicted_time(tmp_path: Path) -> None:
    path = tmp_path / "gpu.plt"
    path.write_text(
        JOB.replace("cpus = 2", "gpus = 1\n  kind = h100").replace(
            "mlp(widths = [width])", "mlp(widths = [8192, width])"
        )
    )
    one, other = load_variant(path), load_variant(path, {"model.network": "mlp(widths = [8192, 8192])"})
    assert_step_time(one, one)
    said = failure(assert_step_time, other, one, slower_by=0.1)
    assert "and 10% more are allowed" in said and said.startswith(other.command)
    assert_step_time(other, one, slower_by=1e6)


def test_a_job_with_mistakes_shows_them(job: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.plt"
    bad.write_text(JOB.replace("batch  = 64", "bach = 64"))
    for assertion in (assert_accepted, assert_within_memory):
        assert "error[E0107]: `data` has no field `bach`" in failure(assertion, load_variant(bad))
    bad.write_text(JOB)
    assert_accepted(load_variant(bad))
    assert "E0101" in failure(assert_accepted, load_variant("none.plt"))


@given(networks(depth=1))
@settings(max_examples=20)
def test_networks_are_values_of_the_language(text: str) -> None:
    report = Report()
    parse(Source("network.plt", f"model {{\n  network = {text}\n}}\n"), report)
    assert not report.errors
    assume(text)


def test_nothing_heavy_is_imported_and_no_process_starts() -> None:
    code = (
        "import sys\nfrom dslc.testing import *\n"
        f"variant = load_variant({str(TESTS / 'bad' / 'base' / 'digits.plt')!r})\n"
        "assert_accepted(variant)\nassert_same_training(variant, variant)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
