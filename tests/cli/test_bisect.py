"""`dslc bisect`: two plans that train alike have no difference but rounding; what parts them is named."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers.commands import dslc
from helpers.job_texts import job_text
from helpers.paths import HELPERS
from helpers.planted_faults import DIFFERENT_COPIES, FAULTS
from instruments import equal_runs
from safetensors import safe_open
from safetensors.numpy import save_file

from dslc.commands.bisect import failure_notes
from dslc.compiler.facts.checkpoint_names import MANIFEST, name_of
from dslc.runtime.measure.observe import Observation, StepObservation
from dslc.runtime.step import tensor_summaries
from dslc.runtime.step.tensor_summaries import summarize
from dslc.verification.bisection import find_difference, step_rows
from dslc.verification.comparison import order_share, rounding_share_text, share_sentence
from dslc.verification.recordings import (
    CopyDistance,
    RecordedStep,
    RecordingError,
    TensorKey,
    TensorRecording,
    join_ranks,
    read_recording,
    write_recording,
)
from dslc.verification.rounding_bounds import SHARE_LIMIT, measure_bounds

GPT = job_text(
    model={"network": "gpt(layers = 2, width = 32, heads = 2, context = 16, vocab = 256, tie = true, dropout = 0.1)"},
    data={"source": "stdlib()", "batch": 16},
    devices={"cpus": 2},
    train={"steps": 20, "optimizer": "adamw(lr = 1e-3)", "clip": "1.0"},
    log=None,
)
LAYERS = job_text(
    model={"network": "[flatten(), linear(32), relu(), linear(16), relu(), linear(10)]"},
    data={"source": "digits()", "batch": 48},
    devices={"cpus": 2},
    train={"steps": 20, "optimizer": "sgd(lr = 0.1, momentum = 0.9)"},
    log=None,
)


def bisect(folder: Path, *arguments: str, fault: str = "") -> dict[str, Any]:
    """Compares in a folder, with a fault planted; arguments with a `=` are settings."""
    words = (word for each in arguments for word in (("--set", each) if re.match(r"[a-z_.]+=", each) else (each,)))
    run = dslc("bisect", *words, "--json", cwd=folder, env={**os.environ, "DSLC_FAULT": fault})
    assert run.returncode in (0, 1), run.stdout + run.stderr
    assert run.stdout, run.stderr
    result: dict[str, Any] = json.loads(run.stdout)
    assert result["same"] == (run.returncode == 0)
    return result


def record(folder: Path, text: str) -> Path:
    """Writes a job and a recording of two steps of it; returns the folder."""
    shutil.copy(HELPERS / "planted_faults.py", folder)
    (folder / "job.plt").write_text(text)
    run = dslc("bisect", "job.plt", "--steps=2", "--record", "a.recording", cwd=folder)
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.fullmatch(r"a\.recording: \d+ tensors of 2 steps\n", run.stdout)
    return folder


# ------------------------------------------------------------------------------------------------------ the summaries


def test_the_summary_of_a_tensor_is_the_sum_of_its_parts() -> None:
    whole = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
    full = (slice(0, 6), slice(0, 5), slice(0, 4))
    sums, nonfinite = summarize(whole, full, (6, 5, 4))
    parts = [(slice(0, 2), *full[1:]), (slice(2, 6), slice(0, 3), full[2]), (slice(2, 6), slice(3, 5), full[2])]
    added = torch.stack([summarize(whole[part], part, (6, 5, 4))[0] for part in parts]).sum(0)
    torch.testing.assert_close(added, sums, rtol=0, atol=1e-12)
    assert int(nonfinite) == 0
    empty = (slice(6, 6), *full[1:])
    assert float(summarize(whole[empty], empty, (6, 5, 4))[0].norm()) == 0, "of a rank beyond the last shard"
    moved, _ = summarize(whole.flip(0), full, (6, 5, 4))
    assert (moved - sums).norm() > 1, "numbers that change places show"
    whole[3, 1, 2] = math.nan
    assert int(summarize(whole, full, (6, 5, 4))[1]) == 1


def test_long_rows_are_summarized_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    part = (slice(0, 3), slice(0, 50))
    sums, _ = summarize(whole, part, (3, 50))
    sizes: list[int] = []

    def mixed(numbers: torch.Tensor) -> torch.Tensor:
        sizes.append(numbers.numel())
        return original(numbers)

    original = tensor_summaries._mixed
    monkeypatch.setattr(tensor_summaries, "_CHUNK", 7)
    monkeypatch.setattr(tensor_summaries, "_mixed", mixed)
    torch.testing.assert_close(summarize(whole, part, (3, 50))[0], sums, rtol=0, atol=1e-12)
    assert max(sizes) <= 7


def test_the_norm_of_a_difference_is_estimated() -> None:
    random = torch.Generator().manual_seed(0)
    one = torch.randn(300, 40, generator=random)
    apart = 1e-3 * torch.randn(300, 40, generator=random)
    part = (slice(0, 300), slice(0, 40))
    first, second = (summarize(each, part, (300, 40))[0] for each in (one, one + apart))
    assert float((second - first).norm()) == pytest.approx(float(apart.norm()), rel=0.2)
    scalar, _ = summarize(torch.tensor(2.5), (), ())
    assert float(scalar.norm()) == 2.5


# ------------------------------------------------------------------------------------------------------- comparisons


def key(kind: str, name: str = "", step: int = 1) -> TensorKey:
    return TensorKey(step=step, kind=kind, name=name)


KEYS = [
    key(kind, name, step)
    for step in (1, 2)
    for kind, names in (("output", "ab"), ("loss", ("",)), ("gradient", "ba"), ("norm", ("",)), ("state", "ab"))
    for name in names
]


def recording(**changes: float) -> TensorRecording:
    """Returns a recording of two steps; `output_b=1e-3` moves one tensor of the second step by as much."""
    random = np.random.default_rng(0)
    made = TensorRecording(name="made", description="1 rank", lines={"b": "job.plt:2:3"})
    for step in (1, 2):
        made.steps.append(RecordedStep(step=step, samples=(1, 2), digests=("x", "y"), lr=0.1, number=2.0))
    for each in KEYS:
        size = 1 if each.kind in ("loss", "norm") else 256
        made.sums[each] = random.normal(size=size)
        made.numbers[each] = size, 0
    for change, factor in changes.items():
        kind, _, name = change.partition("_")
        moved = made.sums[key(kind, name, 2)]
        moved += factor * np.abs(moved)
    return made


def noisy(seed: int) -> TensorRecording:
    random, made = np.random.default_rng(seed), recording()
    for sums in made.sums.values():
        sums += 1e-7 * random.normal(size=sums.shape)
    return made


BOUNDS = measure_bounds(recording(), [noisy(1), noisy(2)])


def test_rounding_is_no_difference() -> None:
    result = find_difference(noisy(3), noisy(4), BOUNDS, recording())
    assert not result.text and len(result.compared) == len(KEYS) and not result.missing
    assert result.largest is not None and 0.1 < result.largest.share < 3


def test_a_number_that_was_exact_by_chance_is_allowed_what_it_is_made_of_rounds() -> None:
    exact = noisy(1)
    exact.sums[key("loss")] = recording().sums[key("loss")]
    bounds = measure_bounds(recording(), [exact])
    relative = [bounds[key("output", name)] / np.linalg.norm(recording().sums[key("output", name)]) for name in "ab"]
    assert bounds[key("loss")] == pytest.approx(np.mean(relative) * abs(recording().sums[key("loss")][0]))
    assert bounds[key("norm")] >= math.hypot(*(bounds[key("gradient", name)] for name in "ab"))


def test_an_output_that_other_orders_mix_is_not_compared() -> None:
    """Its first dim is time."""
    mixed = [noisy(2), noisy(3)]
    for each in mixed:
        each.sums[key("output", "b", 2)] = each.sums[key("output", "b", 2)][::-1].copy()
    bounds = measure_bounds(recording(), [noisy(1), *mixed])
    assert key("output", "b", 2) not in bounds and len(bounds) == len(KEYS) - 1
    assert bounds[key("loss", "", 2)] < 1e-5, "it takes nothing from that output"
    result = find_difference(noisy(3), recording(loss_=1e-3), bounds, recording())
    assert result.text == "the loss" and result.missing == [key("output", "b", 2)]


def test_trainings_that_failed_are_noted() -> None:
    assert failure_notes("", 0, 2) == []
    assert failure_notes("float64", 1, 2) == [
        "the training in float64 failed, so outputs are not compared",
        "1 of 2 trainings with other orders of samples failed: rounding may be more",
    ]


def test_without_float64_outputs_are_not_compared() -> None:
    """Other orders of samples change sums alone."""
    one = noisy(1)
    bounds = measure_bounds(one, [one, noisy(2)])
    assert {each.kind for each in bounds} == {"loss", "gradient", "norm", "state"}
    relative = max(bounds[each] / np.linalg.norm(one.sums[each]) for each in bounds if each.kind == "gradient")
    assert bounds[key("loss")] >= 0.3 * relative * abs(one.sums[key("loss")][0])
    result = find_difference(one, recording(output_a=1.0, state_b=1e-4), bounds)
    assert result.text == "`b` after the update" and {each.kind for each in result.missing} == {"output"}


def test_shares_that_are_not_finite_are_said_to_be() -> None:
    assert rounding_share_text(math.inf) == rounding_share_text(math.nan) == "not finite"
    assert share_sentence("a loss", math.inf) == "the difference of a loss is not finite"
    assert max([1.0, math.nan, 2.0], key=order_share) is math.nan
    exact = {**BOUNDS, key("output", "a", 2): 0.0}
    result = find_difference(noisy(3), recording(output_a=1e-4), exact, recording())
    assert (
        "from one process without rounding, A differs by infinitely many times the rounding and B by infinitely many "
        "times the rounding" in result.details
    )


@pytest.mark.parametrize(
    ("changes", "text", "line"),
    [
        ({"output_b": 1e-4, "gradient_a": 1e-2, "loss_": 1.0}, "the output of `b`", "job.plt:2:3"),
        ({"gradient_a": 1e-4, "state_b": 1.0}, "the gradient of `a`", ""),
        ({"loss_": 1e-4}, "the loss", ""),
        ({"norm_": 1e-4, "state_a": 1.0}, "the norm of the gradient", ""),
        ({"state_b": 1e-4}, "`b` after the update", "job.plt:2:3"),
    ],
)
def test_the_first_tensor_is_named(changes: dict[str, float], text: str, line: str) -> None:
    result = find_difference(noisy(3), recording(**changes), BOUNDS, recording())
    assert (result.text, result.step, result.line) == (text, 2, line)
    assert result.first is not None and result.first.share > 100
    assert any("B is the one that differs" in detail for detail in result.details)
    before = next(n for n, each in enumerate(KEYS) if each == result.first.key)
    assert f"{before} tensors before it agree" in result.details


def test_what_a_step_begins_with_comes_first() -> None:
    one, other = recording(), recording(output_b=1.0)
    steps = other.steps[1]
    for change, text in (
        ({"samples": (1, 3)}, "the samples: A alone has 2; B alone has 3"),
        ({"samples": (1, 1)}, "the samples: A alone has 2"),
        ({"digests": ("x", "z")}, "the numbers of the samples 2: the data give others for the same index"),
        ({"number": 3.0}, "the divisor of the losses: 2 in A and 3 in B"),
    ):
        other.steps[1] = replace(steps, **change)
        result = find_difference(one, other, BOUNDS)
        assert (result.text, result.step) == (text, 2)
    other = recording(state_a=1.0)
    other.steps[1] = replace(steps, lr=0.2)
    assert find_difference(one, other, BOUNDS).text == "the learning rate: 0.1 in A and 0.2 in B"


def test_copies_nonfinite_numbers_and_missing_tensors() -> None:
    one, other = recording(), recording()
    other.copies[key("state", "b")] = CopyDistance(rank=3, reference=0, distance=0.5)
    result = find_difference(one, other, BOUNDS)
    assert result.text == "`b` after the update within B: rank 3's copy is 0.5 away from rank 0's"
    assert (result.step, result.line) == (1, "job.plt:2:3")
    other = recording()
    other.numbers[key("gradient", "b", 2)] = 256, 7
    result = find_difference(one, other, BOUNDS)
    assert result.text == "the gradient of `b`"
    assert "0 of its numbers are not finite in A, 7 in B" in result.details
    other = recording(output_a=1.0)
    del other.sums[key("output", "a", 2)]
    other.numbers[key("output", "b", 1)] = 255, 0
    assert find_difference(one, other, BOUNDS).missing == [key("output", "b", 1), key("output", "a", 2)]
    other = recording()
    other.sums[key("output", "c")], other.numbers[key("output", "c")] = np.ones(256), (256, 0)
    assert find_difference(one, other, BOUNDS).missing == [key("output", "c")]
    other = recording()
    other.copies[key("output", "b")] = CopyDistance(rank=3, reference=0, distance=1e-16)
    without = {each: bound for each, bound in BOUNDS.items() if each.kind != "output"}
    assert not find_difference(one, other, without).text, "an output without a measured rounding"


def test_a_file_holds_a_recording(tmp_path: Path) -> None:
    made = noisy(1)
    made.copies[key("state", "b")] = CopyDistance(rank=3, reference=0, distance=0.5)
    path = str(tmp_path / "a.recording")
    write_recording(path, made, BOUNDS)
    read, bounds = read_recording(path)
    assert bounds == BOUNDS and list(read.sums) == KEYS
    assert all(np.array_equal(read.sums[each], made.sums[each]) for each in KEYS)
    assert (read.steps, read.numbers, read.copies, read.lines) == (made.steps, made.numbers, made.copies, made.lines)
    file: Any = safe_open(path, framework="np")
    assert len(file.metadata()) == 1, "metadata has at most 100 MB"
    with pytest.raises(FileNotFoundError):
        write_recording(str(tmp_path / "none" / "a.recording"), made, BOUNDS)
    (tmp_path / "b.recording").write_text("{}")
    run = dslc("bisect", "a.recording", "b.recording", cwd=tmp_path)
    assert run.returncode == 1 and "error[E1201]: b.recording is no recording: " in run.stderr
    header = np.frombuffer(
        b'{"name": "", "description": "", "lines": {}, "steps": [], "precision": "float32", "by_nature": [],'
        b' "rows": [[{"step": 1, "kind": "loss", "name": ""}, 1, 1, 0, 0.1, null, []]]}',
        dtype=np.uint8,
    )
    save_file({"sums": np.zeros(1), "header": header}, tmp_path / "flat.recording", {"recording": "2"})
    with pytest.raises(RecordingError, match="is no recording"):
        read_recording(str(tmp_path / "flat.recording"))
    run = dslc("bisect", "a.recording", "a.recording", cwd=tmp_path)
    assert run.returncode == 1, "a copy differs"
    assert "they part at step 1, at `b` after the update within A: rank 3's copy is 0.5 away" in run.stdout
    made.copies.clear()
    write_recording(path, made, BOUNDS)
    run = dslc("bisect", "a.recording", "a.recording", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "no difference that rounding does not explain, in 16 tensors" in run.stdout
    made.steps = [replace(each, step=each.step + 2) for each in made.steps]
    write_recording(str(tmp_path / "c.recording"), made, BOUNDS)
    run = dslc("bisect", "a.recording", "c.recording", cwd=tmp_path)
    assert run.returncode == 2 and "A and B have no step in common: nothing can be compared" in run.stderr


def test_what_cannot_be_compared_or_written_is_refused_before_a_training(tmp_path: Path) -> None:
    (tmp_path / "job.plt").write_text(LAYERS)
    saved = tmp_path / "checkpoints" / name_of(20)
    saved.mkdir(parents=True)
    (saved / MANIFEST).write_text("{}")
    run = dslc("bisect", "job.plt", "--from", str(saved), cwd=tmp_path)
    assert run.returncode == 2 and "job.plt has 20 steps: there is no step 21" in run.stderr
    run = dslc("bisect", "job.plt", "--record", "none/a.recording", cwd=tmp_path)
    assert run.returncode == 2 and "a folder that exists, and none does not" in run.stderr


def test_samples_that_a_step_takes_twice_stay_two() -> None:
    step = StepObservation(
        step=1, samples=(5, 3, 5), digests=("x", "y", "x"), total=1.0, number=1.0, norm=1.0, lr=0.1, noise=False
    )
    (joined,) = join_ranks("one", cast(Observation, _Seen([(step,)]))).steps
    assert (joined.samples, joined.digests) == ((3, 5, 5), ("y", "x", "x"))


def test_losses_that_are_not_finite_are_counted() -> None:
    step = StepObservation(step=1, samples=(), digests=(), total=1.0, number=1.0, norm=1.0, lr=0.1, noise=False)
    steps = step, replace(step, total=math.inf)
    one, other = (join_ranks("one", cast(Observation, _Seen([(each,)]))) for each in steps)
    bounds = dict.fromkeys(one.sums, 1e-6)
    result = find_difference(one, other, bounds)
    assert result.text == "the loss" and result.details[0] == "0 of its numbers are not finite in A, 1 in B"
    [(_, losses, _, _)] = step_rows(one, other, bounds)
    assert losses == (1.0, None)


class _Seen:
    """An observation without tensors."""

    def __init__(self, ranks: list[tuple[StepObservation, ...]]) -> None:
        self.ranks = ranks

    def summaries(self, rank: int) -> tuple[list[object], list[object]]:
        return [], []


# ------------------------------------------------------------------------------------------------------- real trainings


@pytest.fixture(scope="module")
def recorded_gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("gpt"), GPT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("parallelism.tensor=2",),
        ("parallelism.context=2",),
        ("parallelism.pipeline=2", "parallelism.microbatches=2"),
        ("parallelism.tensor=2", "parallelism.data=2", "devices.cpus=4", "parallelism.zero=3"),
        ("memory.recompute=full", "parallelism.zero=3"),
        ("parallelism.zero=2", "parallelism.microbatches=4"),
    ],
    ids=" ".join,
)
def test_each_axis_differs_by_rounding_alone(recorded_gpt: Path, settings: tuple[str, ...]) -> None:
    result = bisect(recorded_gpt, "a.recording", "job.plt", *settings, "--steps=2")
    assert result["same"], result
    assert result["compared"] > 150 and result["missing"] < 10
    assert result["largest"]["share"] < result["limit"] == SHARE_LIMIT


@pytest.mark.slow
def test_a_plan_in_16_bits_and_one_process(tmp_path: Path) -> None:
    (tmp_path / "job.plt").write_text(GPT.replace("train {", "train {\n  precision = bf16"))
    result = bisect(tmp_path, "job.plt", "--steps=2")
    assert result["same"], result
    assert result["b"] == {"name": "job.plt in one process", "plan": "one process"}
    assert 0 < result["largest"]["share"] < SHARE_LIMIT and result["compared"] > 150


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "at"),
    [
        ("train.optimizer.weight_decay=1e-4", "`1.weight` after the update"),
        ("train.clip=1e-3", "`1.weight` after the update"),
        ("train.optimizer.lr=0.100001", "the learning rate: 0.1 in A and 0.100001 in B"),
        ("train.seed=7", "the samples: "),
        ("model.network=[flatten(), linear(32), gelu(), linear(16), relu(), linear(10)]", "the output of `2`"),
    ],
)
def test_two_jobs_part_where_they_differ(tmp_path: Path, setting: str, at: str) -> None:
    (tmp_path / "job.plt").write_text(LAYERS)
    result = bisect(tmp_path, "job.plt", setting, "--steps=1")
    assert not result["same"] and result["step"] == 1
    assert result["at"].startswith(at), result


@pytest.mark.slow
def test_two_runs_are_replayed_from_the_last_checkpoint_before_they_part(tmp_path: Path) -> None:
    """The second has another learning rate from step 6 on."""
    (tmp_path / "rates.py").write_text("def factor(step, steps, late):\n    return 1.0 if step < 5 else late\n")
    schedule = 'train.lr_schedule=python("rates:factor", late = {})'
    (tmp_path / "job.plt").write_text(LAYERS)
    for name, late in (("one", 1.0), ("two", 1.5)):
        settings = ("checkpoint.every=2 steps", "checkpoint.keep=9", "log.every=1 step", "train.steps=8")
        words = (word for each in (schedule.format(late), *settings) for word in ("--set", each))
        run = dslc("run", "job.plt", *words, "--out", name, cwd=tmp_path)
        assert run.returncode == 0, run.stdout + run.stderr
    run = dslc("bisect", "one", "two", cwd=tmp_path)
    assert run.returncode == 1, run.stdout + run.stderr
    assert (
        "the logged losses part at step 7, and agree up to step 6: both are replayed from the checkpoint of step 4"
        in (run.stdout)
    )
    assert "they part at step 6, at the learning rate: 0.1 in A and 0.15 in B" in run.stdout


@pytest.mark.long
def test_a_hundred_equal_runs_have_no_difference() -> None:
    assert equal_runs.main(100, 2) == 0


# ----------------------------------------------------------------------------------------------------- planted faults

FAULTY = job_text(
    model={"network": 'python("planted_faults:net")'},
    data={"source": 'python("planted_faults:data")', "batch": 24},
    devices={"cpus": 2},
    parallelism={"microbatches": 2},
    train={
        "steps": 10,
        "optimizer": "adamw(lr = 1e-2)",
        "no_decay": '["*.bias"]',
        "lr_schedule": "warmup_cosine(warmup = 3 steps)",
        "clip": "0.1",
    },
    log=None,
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("faults"), FAULTY)


def test_a_planted_fault_is_named_and_another_plan_is_none(recorded: Path) -> None:
    result = bisect(recorded, "a.recording", "job.plt", "--steps=1", fault="a wrong backward pass")
    assert (result["at"], result["step"], result["line"]) == ("the gradient of `norm.bias`", 1, "job.plt:3:13")
    assert result["tensor"]["share"] > SHARE_LIMIT > 2 > result["steps"][0]["loss_share"]
    result = bisect(recorded, "a.recording", "job.plt", "parallelism.zero=3", "--steps=1")
    assert result["same"] and result["compared"] == 20 and result["missing"] == 0, result
    assert result["largest"]["share"] < 5


@pytest.mark.cases(3)
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_each_of_sixteen_planted_faults_is_named(recorded: Path, fault: str) -> None:
    """By `bisect`, or by the comparison of copies."""
    if FAULTS[fault][1] == DIFFERENT_COPIES:
        run = dslc("bisect", "a.recording", "job.plt", cwd=recorded, env={**os.environ, "DSLC_FAULT": fault})
        assert run.returncode == 3 and DIFFERENT_COPIES in run.stderr, run.stderr
        return
    result = bisect(recorded, "a.recording", "job.plt", "--steps=2", fault=fault)
    assert not result["same"] and re.match(FAULTS[fault][1], result["at"]), result
    assert result["step"] == (2 if fault == "a forgotten moment" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), ("parallelism.microbatches=3",), ("devices.cpus=3",)], ids=" ".join)
def test_without_a_fault_another_plan_is_the_same(recorded: Path, settings: tuple[str, ...]) -> None:
    result = bisect(recorded, "a.recording", "job.plt", *settings, "--steps=2")
    assert result["same"] and result["compared"] == 40, result


@pytest.mark.slow
def test_a_network_that_cannot_be_float64_is_compared_but_for_its_outputs(tmp_path: Path) -> None:
    shutil.copy(HELPERS / "planted_faults.py", tmp_path)
    (tmp_path / "narrow.py").write_text(
        "import planted_faults\nfrom planted_faults import data\n\n"
        "class Net(planted_faults.Net):\n    def forward(self, x):\n        return super().forward(x.float())\n\n"
        "def net():\n    return Net()\n"
    )
    (tmp_path / "job.plt").write_text(FAULTY.replace("planted_faults:", "narrow:"))
    result = bisect(tmp_path, "job.plt", "--steps=1")
    assert result["same"] and (result["compared"], result["missing"]) == (14, 6), result
    assert result["notes"] == ["the training in float64 failed, so outputs are not compared"]
