"""A checkpoint of one plan is resumed under any other: the curve is that of a training in one piece."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import dslc
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.trained import ready, train
from safetensors.numpy import load_file

from dslc.runtime.checkpoint.files import checkpoints_in, read_manifest
from dslc.runtime.process.records import read_metrics

GPT = job_text(
    model={"network": "gpt(layers = 2, width = 32, heads = 2, context = 16, vocab = 256, tie = true)"},
    data={"source": "stdlib()", "batch": 16},
    train={
        "steps": 20,
        "optimizer": "adamw(lr = 1e-3, weight_decay = 0.1)",
        "lr_schedule": "warmup_cosine(warmup = 5 steps)",
        "clip": "0.5",
    },
)
# An epoch of 8 steps, the last of which has 38 samples.
CONVNET = job_text(
    model={"network": "[conv2d(6, kernel = 3), batch_norm(), relu(), max_pool2d(2), flatten(), linear(10)]"},
    data={"source": "digits()", "batch": 200, "last_batch": "keep", "validation": "20%"},
    train={"steps": 20, "optimizer": "sgd(lr = 0.05, momentum = 0.9)"},
    evaluate={"every": "1 epoch"},
)
PLANS = {
    "one process": ("devices.cpus=1",),
    "one process in pieces": ("devices.cpus=1", "parallelism.microbatches=2", "memory.recompute=full"),
    "2 ranks, zero 0": ("devices.cpus=2",),
    "4 ranks, zero 1": ("devices.cpus=4", "parallelism.zero=1"),
    "4 ranks, zero 2": ("devices.cpus=4", "parallelism.zero=2"),
    "2 ranks, zero 3": ("devices.cpus=2", "parallelism.zero=3"),
    "4 ranks, zero 3, 2 replicas": ("devices.cpus=4", "parallelism.zero=3", "parallelism.replicas=2"),
}


class Trainer:
    """Trains a job a part at a time, each under a plan of its own, in one run directory."""

    def __init__(self, launcher: Launcher, folder: Path, text: str) -> None:
        self._launcher, self.folder, self._job = launcher, folder / "run", folder / "made.plt"
        folder.mkdir(exist_ok=True)
        self._job.write_text(text)

    def until(self, step: int, plan: Sequence[str], *settings: str) -> str:
        """Continues to the end of `step`; returns the output."""
        made = ready(self._job, *plan, "checkpoint.every=1000 steps", "checkpoint.resume=auto", *settings)
        return train(self._launcher, self.folder, made.program, made.places, steps=step).shown


def agree(one: Path, other: Path, tolerance: float = 1e-5, weights: float = 1e-5) -> None:
    """The same records (`other` has evaluated at the end of each of its parts besides), and the same weights."""
    wanted, found = read_metrics(str(one)), read_metrics(str(other))
    evaluated = [line["step"] for line in wanted if line["split"] == "validation"]
    found = [line for line in found if line["split"] == "train" or line["step"] in evaluated]
    a, b = ([(line["step"], line["split"], line["samples"]) for line in lines] for lines in (wanted, found))
    assert a == b
    np.testing.assert_allclose([f["loss"] for f in found], [w["loss"] for w in wanted], rtol=0, atol=tolerance)
    begun, ended = (load_file(run / "weights.safetensors") for run in (one, other))
    assert begun.keys() == ended.keys()
    for name, value in begun.items():
        bound = 1e-4 if "running_" in name else weights
        np.testing.assert_allclose(ended[name], value, rtol=0, atol=bound, err_msg=name)


ADAM = 0.05 * 1e-3 * 20  # the tolerance of parameters under Adam


def test_two_ranks_sharded_then_four_then_one(launcher: Launcher, tmp_path: Path) -> None:
    """2 ranks, zero 3 -> 4 ranks, zero 1 -> 1 rank, cut in mid-epoch (steps 7 and 13; an epoch has hundreds)."""
    whole, cut = (Trainer(launcher, tmp_path / name, GPT) for name in ("whole", "cut"))
    whole.until(20, PLANS["one process"])
    cut.until(7, PLANS["2 ranks, zero 3"])
    assert "resumes after step 7" in cut.until(13, PLANS["4 ranks, zero 1"])
    assert "resumes after step 13" in cut.until(20, PLANS["one process"])
    agree(whole.folder, cut.folder, weights=ADAM)


def _walk(launcher: Launcher, folder: Path, text: str, names: Sequence[str], *settings: str) -> Path:
    """One training of 20 steps, under several plans in turn."""
    trainer = Trainer(launcher, folder, text)
    parts = len(names)
    for n, name in enumerate(names, 1):
        trainer.until(round(20 * n / parts), PLANS[name], *settings)
    return trainer.folder


def _once_each(names: Sequence[str]) -> list[str]:
    """Returns a walk in which every ordered pair of different names follows one another once."""
    left = set(itertools.permutations(names, 2))
    path, walk = [names[0]], []
    while path:  # Hierholzer: the pairs are the edges of a complete graph, which has a circuit through all of them
        following = [b for b in names if (path[-1], b) in left]
        if following:
            left.remove((path[-1], following[0]))
            path.append(following[0])
        else:
            walk.append(path.pop())
    return walk[::-1]


@pytest.mark.parametrize("network", ["gpt", "convnet"])
def test_one_training_through_all_plans(launcher: Launcher, tmp_path: Path, network: str) -> None:
    text, bound = (GPT, ADAM) if network == "gpt" else (CONVNET, 1e-5)
    order = [name for name in PLANS if network == "gpt" or "pieces" not in name]  # statistics are of whole batches
    order = order if network == "gpt" else order[::-1]
    Trainer(launcher, tmp_path / "whole", text).until(20, PLANS["one process"])
    agree(tmp_path / "whole" / "run", _walk(launcher, tmp_path / "cut", text, order), weights=bound)


@pytest.mark.parametrize("settings", [("train.precision=bf16(level = O2)",), ("train.precision=fp16",)])
def test_low_precision_keeps_its_full_weights_and_its_scale(
    launcher: Launcher, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    for name, plans in (("whole", ["2 ranks, zero 3"]), ("cut", ["2 ranks, zero 3", "2 ranks, zero 3"])):
        _walk(launcher, tmp_path / name, GPT, plans, "train.deterministic=true", *settings)
    agree(tmp_path / "whole" / "run", tmp_path / "cut" / "run", tolerance=0, weights=0)
    if "bf16" in settings[0]:  # which step fp16 skips differs from plan to plan
        other = _walk(launcher, tmp_path / "other", GPT, ["4 ranks, zero 1", "2 ranks, zero 3"], *settings)
        agree(tmp_path / "whole" / "run", other, tolerance=2e-2, weights=0.02)


@pytest.mark.long
@pytest.mark.parametrize("network", ["gpt", "convnet"])
def test_every_pair_of_plans(launcher: Launcher, tmp_path: Path, network: str) -> None:
    """Forty-two changes of plan and thirty, two steps apart."""
    text, bound = (GPT, 0.05 * 1e-3 * 86) if network == "gpt" else (CONVNET, 2e-5)
    names = _once_each([name for name in PLANS if network == "gpt" or "pieces" not in name])
    steps = 2 * len(names)
    Trainer(launcher, tmp_path / "whole", text).until(steps, PLANS["one process"])
    cut = Trainer(launcher, tmp_path / "cut", text)
    for n, name in enumerate(names, 1):
        cut.until(2 * n, PLANS[name])
    agree(tmp_path / "whole" / "run", cut.folder, weights=bound)


# ----------------------------------------------------------------------------------------------------- the command


@pytest.mark.slow
def test_a_run_directory_is_gone_on_with_where_the_job_says_so(tmp_path: Path) -> None:
    job, given = tmp_path / "made.plt", ("--set", "checkpoint.every=6 steps", "--set", "log.tensorboard=true")
    job.write_text(CONVNET)
    whole = dslc("run", job, "--out", "whole", *given, cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    short = dslc("run", job, "--out", "run", *given, "--set", "train.steps=9", cwd=tmp_path)
    assert short.returncode == 0, short.stderr
    again = dslc("run", job, "--out", "run", *given, cwd=tmp_path)
    assert again.returncode == 2 and "`--set checkpoint.resume=auto` continues it" in again.stderr
    auto = ("--set", "checkpoint.resume=auto", "--set", "devices.cpus=2", "--set", "parallelism.zero=3")
    gone_on = dslc("run", job, "--out", "run", *given, *auto, cwd=tmp_path)
    assert gone_on.returncode == 0, gone_on.stderr
    assert "resumes after step 9, from run/checkpoints/step-00000009" in gone_on.stdout
    agree(tmp_path / "whole", tmp_path / "run")
    seconds = [line["seconds"] for line in read_metrics(str(tmp_path / "run"))]
    assert seconds == sorted(seconds)
    manifest = read_manifest(checkpoints_in(str(tmp_path / "run" / "checkpoints"))[0])
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert (manifest.step, manifest.world_size, manifest.plan_hash) == (20, 2, plan["hash"])


@pytest.mark.slow
def test_a_training_that_fails_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("""
from pathlib import Path
from torch.nn.functional import cross_entropy

calls = 0

def loss(output, target):
    global calls
    calls += len(output) > 8  # in a step: beforehand it is tried on a few samples
    if calls == 6 and not Path(__file__).with_name("mended").exists():
        raise RuntimeError("not yet")
    return cross_entropy(output, target, reduction="none")
""")
    job = tmp_path / "made.plt"
    job.write_text(CONVNET.replace("cross_entropy()", 'python("own:loss")'))
    given = ("--set", "checkpoint.every=2 steps", "--set", "checkpoint.asynchronous=false")
    failed = dslc("run", job, "--out", "a run", *given, cwd=tmp_path)
    assert failed.returncode == 3, failed.stderr
    command = shlex.split(failed.stderr.splitlines()[-1].removeprefix("to resume:  dslc "))
    (tmp_path / "mended").touch()
    gone_on = dslc(*command, cwd=tmp_path)
    assert gone_on.returncode == 0, gone_on.stderr
    assert "resumes after step 4" in gone_on.stdout


@pytest.mark.slow
def test_a_resume_that_is_refused_does_not_advise_the_same_command_and_says_why_once(tmp_path: Path) -> None:
    job = tmp_path / "made.plt"
    job.write_text(CONVNET)
    given = ("--set", "devices.cpus=1", "--set", "checkpoint.every=2 steps", "--set", "train.steps=4")
    assert dslc("run", job, "--out", "run", *given, cwd=tmp_path).returncode == 0
    for other in ("data.batch=100", "train.optimizer=adam()", "model.network=mlp(widths = [8])"):
        words = (*given, "--set", "checkpoint.resume=auto", "--set", other)
        refused = dslc("run", job, "--out", "run", *words, cwd=tmp_path)
        assert refused.returncode == 3 and "can be resumed" in refused.stderr, refused.stderr
        assert "to resume:" not in refused.stderr
        reasons = [line for line in (refused.stdout + refused.stderr).splitlines() if "step-0000000" in line]
        assert len(reasons) == 1 and "step-00000004, step-00000002: its" in reasons[0], reasons


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("train.steps=8",), "and was to be 0 in the training that wrote the checkpoint, of 4 steps"),
        (("train.optimizer.lr=0.2", "train.steps=5"), "step 5 is "),
        (("train.steps=4",), ""),
    ],
)
def test_a_resume_says_that_the_schedule_is_another(
    launcher: Launcher, tmp_path: Path, more: Sequence[str], words: str
) -> None:
    job = tmp_path / "made.plt"
    job.write_text(CONVNET.replace("momentum = 0.9)", "momentum = 0.9), lr_schedule = warmup_cosine(warmup = 1 steps)"))
    given = ("devices.cpus=1", "train.optimizer.lr=0.15", "checkpoint.every=2 steps", "checkpoint.resume=auto")
    first = ready(job, *given, "train.steps=4")
    train(launcher, tmp_path / "run", first.program, first.places)
    again = ready(job, *given, *more)
    shown = train(launcher, tmp_path / "run", again.program, again.places).shown
    assert ("the learning rate of" in shown) == bool(words) and words in shown


@pytest.mark.parametrize("damaged", [False, True])
def test_a_run_directory_gives_its_last_good_checkpoint(launcher: Launcher, tmp_path: Path, damaged: bool) -> None:
    job = tmp_path / "made.plt"
    job.write_text(CONVNET)
    given = ("devices.cpus=1", "checkpoint.every=2 steps", "train.steps=4")
    first = ready(job, *given)
    train(launcher, tmp_path / "run", first.program, first.places)
    newest = Path(checkpoints_in(str(tmp_path / "run" / "checkpoints"))[0])
    if damaged:
        (newest / next(iter(read_manifest(str(newest)).files))).write_bytes(b"")
    again = ready(job, *given, "train.steps=5", f'checkpoint.resume="{tmp_path / "run"}"')
    shown = train(launcher, tmp_path / "other", again.program, again.places).shown
    assert f"resumes after step {2 if damaged else 4}, from " in shown


def test_a_run_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "made.plt").write_text(CONVNET)
    with pytest.raises(AssertionError, match=r"there is no checkpoint to resume from: .*run holds none"):
        ready(tmp_path / "made.plt", f'checkpoint.resume="{tmp_path / "run"}"')
