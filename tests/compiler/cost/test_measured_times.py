"""The time of a step by a calibration, compared with a calculation by hand; and what a calibration lacks."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.job_texts import job_text
from helpers.planning import compiled

from dslc.compiler.compile import Compiled
from dslc.compiler.cost.estimate import StepEstimate
from dslc.compiler.cost.measured_times import arithmetic, network_of, rest_of, source_of, update_of
from dslc.compiler.facts.calibration import (
    Calibration,
    CollectiveTime,
    LayerTime,
    PassTime,
    RestTime,
    calibration_text,
    layer_signature,
    loss_signature,
)
from dslc.compiler.facts.user_calibrations import calibration_path, this_machine
from dslc.compiler.ir.facts import Facts
from dslc.compiler.plan_facts import differences, facts_of
from dslc.compiler.rules.analyse import analyse
from dslc.compiler.show.explain import explain
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load

JOB = job_text(
    model={"network": "gpt(layers = 4, width = 32, heads = 4, context = 16, vocab = 256)", "loss": "cross_entropy()"},
    data={"source": "synthetic(samples = 640, vocab = 256)", "batch": 16},
    devices={"cpus": 2, "catalogue": '"here.toml"'},
    train={"steps": 20, "optimizer": "adamw(lr = 0.001)"},
)
LAYER = LayerTime(forward=PassTime(fixed=0.001, each=0.01), backward=PassTime(fixed=0.002, each=0.02))
LOSS = LayerTime(forward=PassTime(fixed=0.0, each=0.001), backward=PassTime(fixed=0.0, each=0.001))
UPDATE = 1e-6
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send", "gather", "reduce")
LATENCY = 0.003


def times(folder: Path, **changed: object) -> Calibration:
    """Returns a calibration with all that the plans of JOB need: each layer takes as long. Numbers of `data`, `overlap`
    and `rest` are those of JOB.
    """
    (folder / "here.toml").write_text("[cpu]\n")
    (folder / "job.plt").write_text(JOB)
    staging = compiled(folder / "job.plt").analysis.staging
    assert staging is not None
    model, here, network = staging.model, this_machine(), network_of(staging)
    for name, signature in (("data", source_of(staging)), ("overlap", network), ("rest", network)):
        if not isinstance(changed.get(name), dict):
            number = changed.get(name, 0.0)
            changed[name] = {signature: rest_time(number) if name == "rest" else number}
    calibration = Calibration(
        machine=here.processor,
        torch=here.torch,
        processes=2,
        cores=here.cores,
        layers={layer_signature(layer, "fp32"): LAYER for layer in model.layers},
        losses={loss_signature("cross_entropy", model.output, "fp32"): LOSS},
        updates={"adamw": UPDATE},
        collectives={f"{operation} 2": CollectiveTime(latency=LATENCY, byte=0.0) for operation in OPERATIONS},
    )
    return replace(calibration, **changed)  # type: ignore[arg-type]


def rest_time(seconds: object, each: float = 0.0) -> RestTime:
    assert isinstance(seconds, float)
    return RestTime(microbatches=1, seconds=seconds, each=each)


def planned(folder: Path, *settings: str, **changed: object) -> tuple[Compiled, StepEstimate]:
    text = calibration_text("cpu", times(folder, **changed), "made by hand")
    (folder / "here.toml").write_text(text)
    job = compiled(folder / "job.plt", *settings)
    assert job.analysis.estimate is not None
    return job, job.analysis.estimate


LAYERS, SHARE = 8, 8  # of JOB: embedding, position, four blocks, norm, head; samples of a rank
FORWARD, BACKWARD = (LAYERS * each.seconds(SHARE) for each in (LAYER.forward, LAYER.backward))
PASSES = FORWARD + BACKWARD + LOSS.forward.seconds(SHARE) + LOSS.backward.seconds(SHARE)


def test_a_step_is_the_sum_of_its_parts(tmp_path: Path) -> None:
    job, step = planned(tmp_path)
    assert job.analysis.model is not None
    update = UPDATE * job.analysis.model.parameters
    assert step.source == "measured" and not step.lacks
    assert step.step_time == pytest.approx(PASSES + LATENCY + update)
    assert (step.arithmetic, step.exposed, step.update) == pytest.approx((PASSES, LATENCY, update))
    shown = explain(job.plan)
    assert "by the times that `dslc calibrate` measured" in shown and "at best" not in shown


def test_arithmetic_hides_what_overlaps(tmp_path: Path) -> None:
    _, step = planned(tmp_path, overlap=0.5)
    assert step.exposed == pytest.approx(LATENCY / 2)


def test_samples_are_waited_for_unless_workers_make_them(tmp_path: Path) -> None:
    _, step = planned(tmp_path, data=0.01)
    assert step.samples == pytest.approx(0.01 * SHARE)
    _, step = planned(tmp_path, "data.workers=1", data=0.01)
    assert step.samples == 0


def test_the_rest_of_a_step_is_in_every_plan(tmp_path: Path) -> None:
    _, without = planned(tmp_path)
    _, step = planned(tmp_path, rest=0.25)
    assert step.step_time is not None and without.step_time is not None
    assert step.step_time - without.step_time == pytest.approx(0.25) and step.rest == 0.25


def test_micro_batches_pay_what_is_fixed_each_time(tmp_path: Path) -> None:
    _, step = planned(tmp_path, "parallelism.microbatches=4")
    fixed = LAYERS * (LAYER.forward.fixed + LAYER.backward.fixed)
    assert step.arithmetic == pytest.approx(PASSES + 3 * fixed)


def test_recomputation_takes_a_forward_pass_of_the_blocks(tmp_path: Path) -> None:
    _, step = planned(tmp_path, "memory.recompute=full")
    assert step.arithmetic == pytest.approx(PASSES + 4 * LAYER.forward.seconds(SHARE))


def test_a_shared_optimizer_updates_its_share(tmp_path: Path) -> None:
    _, plain = planned(tmp_path)
    _, shared = planned(tmp_path, "parallelism.zero=1")
    assert shared.update == pytest.approx(plain.update / 2)


def test_stages_wait_for_one_another(tmp_path: Path) -> None:
    settings = ("parallelism.pipeline=2", "parallelism.microbatches=2", "parallelism.stages=[4, 4]")
    _, step = planned(tmp_path, *settings, "parallelism.schedule=gpipe")
    micro, half = 8, LAYERS // 2
    ahead, back = (half * each.seconds(micro) for each in (LAYER.forward, LAYER.backward))
    loss = (LOSS.forward.seconds(micro), LOSS.backward.seconds(micro))
    # The first stage's first pass, two of the last stage's, the way back of the last micro-batch; a message each way.
    whole = ahead + 2 * (ahead + loss[0] + back + loss[1]) + back + 2 * LATENCY
    assert step.step_time is not None
    assert step.step_time - step.update - step.exposed == pytest.approx(whole)


def test_a_plan_is_the_same_by_other_times(tmp_path: Path) -> None:
    """Its facts name the times by a digest, and a plan file made by other times runs."""
    one, step = planned(tmp_path)
    other, later = planned(tmp_path, rest=0.5)
    facts, others = facts_of(one.analysis), facts_of(other.analysis)
    assert step.step_time != later.step_time and one.plan.hash == other.plan.hash
    assert "" != facts.calibration != others.calibration and list(differences(facts, others)) == []


@pytest.mark.parametrize("axis", ("tensor", "context"))
def test_axes_that_cut_layers_make_others_whose_times_have_their_transfers(tmp_path: Path, axis: str) -> None:
    setting = f"parallelism.{axis}=2"
    _, without = planned(tmp_path, setting)
    assert without.lacks == "times of 8 layers, of `embedding` first"
    staging = compiled(tmp_path / "job.plt", setting).analysis.staging
    assert staging is not None
    kind, network = arithmetic(staging), network_of(staging)
    loss = loss_signature("cross_entropy", staging.model.output, kind)
    layers = {layer_signature(layer, kind): LAYER for layer in staging.model.of_a_rank}
    known = {"layers": layers, "losses": {loss: LOSS}, "updates": {update_of(staging): UPDATE}}
    _, step = planned(tmp_path, setting, **known, rest={network: rest_time(0.25)})
    whole = LAYERS * (LAYER.forward.seconds(16) + LAYER.backward.seconds(16))
    assert step.arithmetic == pytest.approx(whole + LOSS.forward.seconds(16) + LOSS.backward.seconds(16))
    assert (step.transfers, step.rest) == (0, 0.25) and step.source == "measured"


def test_hosts_exchange_at_times_of_their_own(tmp_path: Path) -> None:
    settings = ("devices.nodes=2", "devices.cpus=1")
    one, other = CollectiveTime(latency=LATENCY, byte=0.0), CollectiveTime(latency=10 * LATENCY, byte=0.0)
    between = {"all_reduce 2": one, "all_reduce 2 across hosts": other, "send 2 across hosts": one}
    _, step = planned(tmp_path, *settings, processes=1, collectives=between)
    assert step.source == "measured" and step.exposed == pytest.approx(10 * LATENCY)


def test_a_pipeline_has_a_rest_of_its_own(tmp_path: Path) -> None:
    settings = ("parallelism.pipeline=2", "parallelism.microbatches=2")
    _, step = planned(tmp_path, *settings, rest=0.25)
    assert step.rest == 0.25, "that of the network, without one of its own"
    staging = compiled(tmp_path / "job.plt", *settings).analysis.staging
    assert staging is not None
    network = network_of(staging)
    _, step = planned(tmp_path, *settings, rest={network: rest_time(0.25), f"{network} pipeline fsdp": rest_time(1.0)})
    assert step.rest == 1.0, "that of a pipeline with other data ranks"
    own = {network: rest_time(0.25), rest_of(staging): rest_time(0.5, each=0.125)}
    _, step = planned(tmp_path, *settings, rest=own)
    assert step.rest == 0.625, "of two micro-batches"


def test_stages_that_take_turns_on_cores_leave_them_to_others(tmp_path: Path) -> None:
    """Two processes on one core were measured at half its speed; together they keep it busy, if the schedule allows."""
    settings = ("parallelism.pipeline=2", "parallelism.stages=[4, 4]")
    for microbatches, schedule in ((2, "gpipe"), (16, "1f1b")):
        more = (f"parallelism.microbatches={microbatches}", f"parallelism.schedule={schedule}")
        _, apart = planned(tmp_path, *settings, *more)
        _, step = planned(tmp_path, *settings, *more, cores=1)
        busy = (apart.step_time or 0) - apart.exposed - apart.update - apart.waiting
        mean = busy - (LOSS.forward.seconds(16) + LOSS.backward.seconds(16)) / 2  # the last stage has the loss
        assert step.step_time is not None
        assert mean <= step.step_time - step.exposed - step.update < mean + 4 * 2 * microbatches * LATENCY


def test_images_in_another_memory_order_have_times_of_their_own(tmp_path: Path) -> None:
    """Channels stay last under plain sums, and not where `fully_shard` cuts rows."""
    text = job_text(
        model={"network": "[conv2d(8), relu(), flatten(), linear(10)]", "loss": "cross_entropy()"},
        data={"source": "digits()", "batch": 16},
        devices={"cpus": 2},
        train={"steps": 2, "optimizer": "sgd(lr = 0.1)"},
    )
    (tmp_path / "job.plt").write_text(text)
    found = []
    for zero in (0, 3):
        staging = compiled(tmp_path / "job.plt", f"parallelism.zero={zero}").analysis.staging
        assert staging is not None
        found.append(arithmetic(staging))
    assert found == ["fp32, channels last", "fp32"]


def test_batch_norms_of_other_numbers_of_ranks_have_times_of_their_own(tmp_path: Path) -> None:
    """Stages of one data rank share no statistics."""
    text = job_text(
        model={
            "network": "[conv2d(8), batch_norm(), conv2d(8), batch_norm(), flatten(), linear(10), linear(10)]",
            "loss": "cross_entropy()",
        },
        data={"source": "digits()", "batch": 16},
        devices={"cpus": 4},
        train={"steps": 2, "optimizer": "sgd(lr = 0.1)"},
    )
    (tmp_path / "job.plt").write_text(text)
    found = []
    for stages in (1, 2, 4):
        staging = compiled(tmp_path / "job.plt", f"parallelism.pipeline={stages}").analysis.staging
        assert staging is not None
        found.append([part for part in arithmetic(staging).split(", ") if part.startswith("synchronised")])
    assert found == [["synchronised 4"], ["synchronised 2"], []]


def test_a_promise_that_cannot_be_checked_names_what_lacks(tmp_path: Path) -> None:
    (tmp_path / "here.toml").write_text(calibration_text("cpu", times(tmp_path, losses={}), "made by hand"))
    loaded = load(str(tmp_path / "job.plt"), ["expect.step_time<=1s"])
    assert loaded.job is not None
    report = Report()
    report.collect(analyse(loaded.job, Facts()))
    assert [(each.code, each.help) for each in report.found] == [
        ("W0503", "the calibration lacks times of the loss `cross_entropy`")
    ]


@pytest.mark.parametrize(
    "settings, changed, lacking",
    (
        ((), {"layers": {}}, "times of 8 layers, of `embedding` first"),
        ((), {"losses": {}}, "times of the loss `cross_entropy`"),
        ((), {"updates": {"sgd": 1e-9}}, "times of `adamw`"),
        (("train.clip=1.0",), {}, "times of `adamw clip`"),
        ((), {"collectives": {}}, "times of all_reduce among 2 ranks"),
        ((), {"processes": 4}, "times of 2 processes at once: 4 were measured"),
        ((), {"data": {}}, "times of the samples of `synthetic`"),
        (("devices.nodes=2", "devices.cpus=1"), {"processes": 1}, "times of all_reduce among 2 ranks across hosts"),
        (("parallelism.gradients=fp16()",), {}, "times of `fp16`"),
        (("parallelism.tensor=2",), {}, "times of 8 layers, of `embedding` first"),
        (("memory.recompute=selective",), {}, "times of 8 layers, of `embedding` first"),
        (("train.compile=true",), {}, "times of a network that is compiled or offloaded"),
        (("train.precision=bf16",), {}, "times of 8 layers, of `embedding` first"),
    ),
)
def test_what_a_calibration_lacks_is_said(
    tmp_path: Path, settings: tuple[str, ...], changed: dict[str, object], lacking: str
) -> None:
    job, step = planned(tmp_path, *settings, **changed)
    assert step.step_time is None and step.lacks == lacking
    assert f"unknown: the calibration lacks {lacking}" in explain(job.plan)


def test_a_job_without_a_catalogue_is_predicted_by_the_users_own_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it was measured on this machine, with as many processes."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "configuration"))
    by_name, named = planned(tmp_path)
    (tmp_path / "job.plt").write_text(JOB.replace('  catalogue = "here.toml"\n', ""))
    without = compiled(tmp_path / "job.plt")
    assert without.plan.step is None and not facts_of(without.analysis).calibration
    path = Path(calibration_path("cpu", 2))
    path.parent.mkdir(parents=True)
    shutil.copy(tmp_path / "here.toml", path)
    job = compiled(tmp_path / "job.plt")
    assert job.analysis.estimate == named and job.plan.hash == without.plan.hash
    assert facts_of(job.analysis).calibration == facts_of(by_name.analysis).calibration
    assert compiled(tmp_path / "job.plt", "devices.cpus=1").analysis.estimate != named
    path.write_text(path.read_text().replace(f'torch = "{this_machine().torch}"', 'torch = "1.0"'))
    assert compiled(tmp_path / "job.plt").plan.step is None


@pytest.mark.parametrize(
    "text, said", (("[cpu", "is not TOML"), ("[cpu.calibration]\n", "cannot be read"), (None, "read"))
)
def test_a_broken_calibration_of_the_user_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, said: str
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = Path(calibration_path("cpu", 2))
    path.parent.mkdir()
    if text is None:
        path.mkdir()
    else:
        path.write_text(text)
    (tmp_path / "job.plt").write_text(JOB.replace('  catalogue = "here.toml"\n', ""))
    job, report = load(str(tmp_path / "job.plt"), []).job, Report()
    assert job is not None and report.collect(analyse(job, Facts())) is not None
    (warning,) = report.found
    assert warning.code == "W0881" and str(path) in warning.message and said in warning.message


@pytest.mark.parametrize(
    "changed, said", (({"machine": "abacus"}, "a processor `abacus`"), ({"torch": "1.0"}, "torch 1.0"))
)
def test_times_of_another_machine_are_named(tmp_path: Path, changed: dict[str, object], said: str) -> None:
    (tmp_path / "here.toml").write_text(calibration_text("cpu", times(tmp_path, **changed), "made by hand"))
    job, report = load(str(tmp_path / "job.plt"), []).job, Report()
    assert job is not None
    analysis = report.collect(analyse(job, Facts()))
    assert [(each.code, said in each.message) for each in report.found] == [("W0880", True)]
    assert analysis is not None and analysis.estimate is not None and analysis.estimate.source == "measured"
