"""Constants are fitted to steps, and plans predict with them: compared with calculations by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.job_texts import job_text
from helpers.planning import compiled

from dslc.compiler.cost.fitted_times import fit_steps, left_out_errors, run_fit
from dslc.compiler.facts.calibration import CONSTANTS, CONSTANTS_VERSION, RunFit, fit_text, with_constants
from dslc.compiler.facts.catalogue import read_catalogue
from dslc.compiler.facts.hardware import Hardware
from dslc.compiler.facts.user_calibrations import calibration_path, this_machine, with_user_calibration
from dslc.compiler.show.explain import explain
from dslc.dsl.diagnostics import Report

HERE = this_machine()
FIT = RunFit(machine=HERE.processor, torch=HERE.torch, cores=HERE.cores, constants=CONSTANTS_VERSION, runs=3, error=0.1)
JOB = job_text(
    model={"network": "[flatten(), linear(16), relu(), linear(10)]", "loss": "cross_entropy()"},
    data={"source": "digits()", "batch": 64},
    devices={"cpus": HERE.cores},
    train={"steps": 4, "optimizer": "sgd(lr = 0.1)"},
)


def test_constants_that_made_steps_are_found_again() -> None:
    features = [[1.0, 2.0, 0.0], [3.0, 1.0, 1.0], [0.5, 4.0, 2.0], [2.0, 2.0, 5.0]]
    steps = [sum(value * constant for value, constant in zip(row, (0.5, 2.0, 0.0), strict=True)) for row in features]
    assert fit_steps(features, steps) == pytest.approx([0.5, 2.0, 0.0], abs=1e-3)
    assert max(map(abs, left_out_errors(features, steps))) < 0.01
    steps[0] = 0.1  # which a constant below zero would explain
    assert min(fit_steps(features, steps)) == 0


def test_a_step_is_the_sum_of_what_its_constants_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "job.plt").write_text(JOB)
    assert compiled(tmp_path / "job.plt").plan.step is None
    path = Path(calibration_path("cpu"))
    path.parent.mkdir()

    def seconds(*settings: str, **constants: float) -> float:
        path.write_text(fit_text("cpu", with_constants(FIT, constants), "made by hand"))
        job = compiled(tmp_path / "job.plt", *settings)
        estimate = job.analysis.estimate
        assert estimate is not None and estimate.step_time is not None and estimate.source == "fitted"
        assert "by a fit to trainings on this machine" in explain(job.plan)
        return estimate.step_time

    assert seconds(step=0.5) == 0.5
    assert seconds(kernel=0.5) == 6.0, "three layers and the loss in both passes, and four parameters backward"
    model = compiled(tmp_path / "job.plt").analysis.model
    assert model is not None
    flops = sum(layer.forward_flops + layer.backward_flops for layer in model.layers)
    assert seconds(flop=1e-6) == pytest.approx(64 / HERE.cores * flops * 1e-6) and seconds(convolution=1.0) == 0
    numbers = model.parameters * 1e-3
    assert seconds(update=1e-3) == pytest.approx((4 + 8 + 12) * numbers), "forward, backward, and the update"
    assert seconds("train.optimizer=adamw(lr = 0.1)", update=1e-3) == pytest.approx((4 + 8 + 28) * numbers)
    assert seconds("parallelism.microbatches=2", update=1e-3) == pytest.approx((2 * (4 + 16) + 12) * numbers)
    assert seconds(tensor=0.5) == 2.0 and seconds("parallelism.microbatches=4", microbatch=0.5) == 1.5
    assert seconds("devices.cpus=1", flop=1e-6) == pytest.approx(64 / HERE.cores * flops * 1e-6), "on all cores"
    crowded = (f"devices.cpus={2 * HERE.cores}", "parallelism.pipeline=2")
    assert seconds(*crowded, step=0.5) == 1.0, "stages without any arithmetic, two processes to a core"


def test_recomputation_moves_bytes_again(tmp_path: Path) -> None:
    network: dict[str, object] = {
        "network": "gpt(layers = 2, width = 16, heads = 2, context = 8, vocab = 16)",
        "loss": "cross_entropy()",
    }
    data: dict[str, object] = {"source": "synthetic(samples = 64, vocab = 16)", "batch": 8}
    text = job_text(model=network, data=data, devices={"cpus": 2}, train={"steps": 4, "optimizer": "sgd(lr = 0.1)"})
    (tmp_path / "job.plt").write_text(text.replace("devices {", 'devices {\n  catalogue = "here.toml"'))
    (tmp_path / "here.toml").write_text(fit_text("cpu", with_constants(FIT, {"byte": 1e-6}), "made by hand"))
    seconds = []
    for kind in ("none", "selective", "full"):
        estimate = compiled(tmp_path / "job.plt", f"memory.recompute={kind}").analysis.estimate
        assert estimate is not None and estimate.step_time is not None
        seconds.append(estimate.step_time)
    assert seconds[1] == pytest.approx(seconds[2]) and seconds[0] < seconds[1] < 2 * seconds[0]


def test_images_are_laid_out_anew_unless_their_channels_are_last(tmp_path: Path) -> None:
    network: dict[str, object] = {"network": "[conv2d(8), relu(), flatten(), linear(10)]", "loss": "cross_entropy()"}
    data: dict[str, object] = {"source": "synthetic(samples = 64, shape = [3, 8, 8], classes = 10)", "batch": 8}
    text = job_text(model=network, data=data, devices={"cpus": 2}, train={"steps": 4, "optimizer": "sgd(lr = 0.1)"})
    (tmp_path / "job.plt").write_text(text.replace("devices {", 'devices {\n  catalogue = "here.toml"'))
    (tmp_path / "here.toml").write_text(fit_text("cpu", with_constants(FIT, {"cores": 2, "byte": 1.0}), "by hand"))
    seconds = []
    for zero in (0, 3):
        estimate = compiled(tmp_path / "job.plt", f"parallelism.zero={zero}").analysis.estimate
        assert estimate is not None and estimate.step_time is not None
        seconds.append(estimate.step_time)
    moved = 4 * (3 * 8 * 8 + 8 * 6 * 6)
    assert seconds[1] - seconds[0] == pytest.approx(2 * 4 * moved), "of four samples, forward and backward"


def test_collectives_cost_by_where_they_stand(tmp_path: Path) -> None:
    (tmp_path / "job.plt").write_text(JOB.replace("devices {", 'devices {\n  catalogue = "here.toml"'))

    def seconds(zero: int, processes: int, constant: str) -> float:
        fit = with_constants(FIT, {"cores": 2, constant: 1.0})
        (tmp_path / "here.toml").write_text(fit_text("cpu", fit, "made by hand"))
        job = compiled(tmp_path / "job.plt", f"devices.cpus={processes}", f"parallelism.zero={zero}")
        estimate = job.analysis.estimate
        assert estimate is not None and estimate.step_time is not None
        return estimate.step_time

    size = 4 * (65 * 16 + 17 * 10)
    assert seconds(0, 2, "link") == pytest.approx(size), "each rank sends half of it, twice"
    assert seconds(2, 2, "link") == pytest.approx(3.5 * size), "a gather and a whole sum, and a copy of both"
    assert seconds(0, 2, "latency") == 1 and seconds(1, 2, "latency") == 3, "and a broadcast of each rank"
    assert [seconds(2, 2, each) for each in ("latency", "within", "shard", "turn")] == [2, 2, 1, 0]
    assert [seconds(2, 4, each) for each in ("latency", "within", "shard", "turn")] == [2, 4, 2, 2], "on two cores"
    assert seconds(0, 4, "turn") == 1 == seconds(1, 4, "turn") and seconds(0, 4, "within") == 0


@pytest.mark.parametrize(
    "setting, lacking",
    (
        ("train.precision=bf16", "times of `bf16` and `fp16`"),
        ("parallelism.gradients=fp16()", "times of compressed exchanges"),
        ("train.compile=true", "times of compiled networks"),
    ),
)
def test_what_a_fit_does_not_cover_is_said(tmp_path: Path, setting: str, lacking: str) -> None:
    (tmp_path / "job.plt").write_text(JOB.replace("devices {", 'devices {\n  catalogue = "here.toml"'))
    (tmp_path / "here.toml").write_text(fit_text("cpu", FIT, "made by hand"))
    estimate = compiled(tmp_path / "job.plt", "devices.cpus=2", setting).analysis.estimate
    assert estimate is not None and estimate.step_time is None and estimate.lacks == lacking


@pytest.mark.parametrize("old", ("constants = 1", ""))
def test_constants_of_another_version_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str) -> None:
    """A file that was written before their meaning changed has no version."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = Path(calibration_path("cpu"))
    path.parent.mkdir()
    path.write_text(fit_text("cpu", FIT, "made by hand").replace(f"constants = {CONSTANTS_VERSION}", old))
    report = Report()
    assert report.collect(with_user_calibration(Hardware(kind="cpu"), 2)).fit is None
    (warning,) = report.found
    assert warning.code == "W0881" and "its constants are of version" in warning.message, warning
    assert "`dslc calibrate` writes it anew" in str(warning.help)


@pytest.mark.parametrize("after, said", (("flop = -1.0", "flop is -1.0"), ("speed = 1", "speed")))
def test_a_damaged_fit_is_refused(tmp_path: Path, after: str, said: str) -> None:
    (tmp_path / "here.toml").write_text(fit_text("cpu", FIT, "made by hand").replace("flop = 0.0", after, 1))
    report = Report()
    found = report.collect(read_catalogue(str(tmp_path / "here.toml"), None))
    (fault,) = report.errors
    assert fault.code == "E0422" and said in fault.message and found["cpu"].fit is None


def test_a_fit_has_the_error_of_steps_that_others_predict() -> None:
    features = [[float(name == "step") for name in CONSTANTS] for _ in range(4)]
    fit = run_fit(FIT, features, [1.0, 1.0, 1.0, 2.0])
    assert fit.runs == 4 and 0 < fit.error < 0.5 and 1.0 < fit.step < 1.3
