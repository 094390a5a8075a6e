"""A training cut in two equals the training in one piece; damaged checkpoints are found, named and skipped."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.launcher import Command, Launcher, write_program
from helpers.made_programs import conv_model, gpt_model, images, optimizer_step, places, program, python, tokens
from helpers.small_disk import fill, small_disk
from safetensors.numpy import load_file, save_file

from dslc.compiler.ir import program as p
from dslc.compiler.ir.codec import to_json
from dslc.runtime.checkpoint import files
from dslc.runtime.checkpoint.export import export
from dslc.runtime.checkpoint.state import CheckpointError, load_model, write
from dslc.runtime.model.meta_model import build_model
from dslc.runtime.process.records import NOTES, read_metrics
from dslc.runtime.process.run_status import read_status

STEPS = 10


def every(steps: int, **changed: Any) -> p.CheckpointStep:
    return p.CheckpointStep(every=steps, **changed)


def made(ranks: int, data: p.DataStep, **changed: Any) -> p.JobProgram:
    """Returns a job of `STEPS` steps; `stop_after` cuts it, with the learning rate of the whole."""
    stop = changed.pop("stop_after", STEPS)
    rate = p.LearningRateStep(kind="cosine", steps=STEPS, warmup=2)
    return program(ranks, data, **({"learning_rate": rate} | changed | {"steps": stop}))


def train(launcher: Launcher, folder: Path, ranks: int, data: p.DataStep, **changed: Any) -> str:
    """Trains, and returns the output."""
    outcome, shown = launcher.launch(made(ranks, data, **changed), places(ranks), folder)
    assert outcome.is_complete, outcome
    return str(shown)


def fails(launcher: Launcher, folder: Path, ranks: int, data: p.DataStep, **changed: Any) -> str:
    """Returns the message of a training that fails."""
    outcome, _ = launcher.launch(made(ranks, data, **changed), places(ranks), folder)
    assert outcome.failure is not None, outcome
    return str(outcome.failure.message)


def curve(folder: Path) -> list[tuple[int, float, int]]:
    """Returns step, loss and samples of each record of the training."""
    lines = [line for line in read_metrics(str(folder)) if line["split"] == "train"]
    return [(line["step"], line["loss"], line["samples"]) for line in lines]


def agree(folder: Path, other: Path, exactly: bool = False, weights: float = 1e-5) -> None:
    """Asserts every step once, with the same losses, and the same weights at the end."""
    a, b = curve(folder), curve(other)
    assert [line[0] for line in a] == list(range(1, STEPS + 1)) == [line[0] for line in b]
    assert [line[2] for line in a] == [line[2] for line in b], "samples seen"
    np.testing.assert_allclose([line[1] for line in a], [line[1] for line in b], rtol=0, atol=0 if exactly else 1e-5)
    one, two = (load_file(run / "weights.safetensors") for run in (folder, other))
    assert one.keys() == two.keys()
    for name, value in one.items():
        np.testing.assert_allclose(two[name], value, rtol=0, atol=0 if exactly else weights, err_msg=name)


def newest(folder: Path) -> Path:
    return Path(files.checkpoints_in(str(folder / "checkpoints"))[0])


def notes(folder: Path) -> str:
    return (folder / NOTES).read_text()


# ------------------------------------------------------------------------------------------------------- going on


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_training_in_three_pieces_on_other_numbers_of_ranks(
    launcher: Launcher, tmp_path: Path, asynchronous: bool
) -> None:
    """Cut in the middle of an epoch (of six steps), with batch norm, momentum and a learning rate that moves."""
    data = images(tmp_path, batch=16)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(launcher, whole, 1, data)
    train(launcher, cut, 2, data, stop_after=4, checkpoint=every(3, asynchronous=asynchronous))
    names = [Path(path).name for path in files.checkpoints_in(str(cut / "checkpoints"))]
    assert names == ["step-00000004", "step-00000003"], "multiples of `every`, and the last step"
    again = every(4, keep=1, asynchronous=asynchronous, resume="auto")
    assert "resumes after step 4" in train(launcher, cut, 4, data, stop_after=7, checkpoint=again)
    assert "resumes after step 7" in train(launcher, cut, 1, data, checkpoint=again)
    agree(whole, cut)
    assert sorted(os.listdir(cut / "checkpoints")) == ["step-00000010"], "`keep` of them, and nothing else"


def test_a_tied_model_under_adamw_with_frozen_and_undecayed_parameters(launcher: Launcher, tmp_path: Path) -> None:
    data = tokens(tmp_path)
    changed: dict[str, Any] = {
        "model": gpt_model(),
        "sync_batch_norm": False,
        "clip": 0.5,
        "microbatches": 2,
        "optimizer": optimizer_step("AdamW", lr=0.01, weight_decay=0.1),
    }
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(launcher, whole, 2, data, **changed)
    train(launcher, cut, 1, data, stop_after=5, checkpoint=every(5), **changed)
    manifest = files.read_manifest(str(newest(cut)))
    assert manifest.fit.tensors is not None and "3.weight" not in manifest.fit.tensors, "a tied weight once"
    train(launcher, cut, 2, data, checkpoint=every(5, resume="auto"), **changed)
    agree(whole, cut, weights=0.05 * 0.01 * STEPS)


@pytest.mark.parametrize("kind", ["Adagrad", "NAdam", "RMSprop", "SGD without momentum"])
def test_other_optimizers(launcher: Launcher, tmp_path: Path, kind: str) -> None:
    arguments: dict[str, Any] = {"momentum": 0.5, "centered": True} if kind == "RMSprop" else {}
    optimizer = optimizer_step(kind.split(maxsplit=1)[0], lr=0.01, **arguments)
    data = images(tmp_path)
    train(launcher, tmp_path / "whole", 2, data, optimizer=optimizer)
    train(launcher, tmp_path / "cut", 2, data, stop_after=5, checkpoint=every(5), optimizer=optimizer)
    train(launcher, tmp_path / "cut", 2, data, checkpoint=every(5, resume="auto"), optimizer=optimizer)
    agree(tmp_path / "whole", tmp_path / "cut", exactly=True)


NOISY = """
import torch

def net():
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.5),
        torch.nn.Linear(32, 10),
    )
"""


def test_noise_and_the_scale_of_losses_go_on_where_they_were(launcher: Launcher, tmp_path: Path) -> None:
    """The same plan, to the bit: dropout, the statistics of each rank's own batch norm, and a scale that grows."""
    (tmp_path / "net.py").write_text(NOISY)
    changed: dict[str, Any] = {
        "model": p.ModelStep(python=python("net:net", tmp_path)),
        "sync_batch_norm": False,
        "deterministic": True,
        "precision": p.PrecisionStep(dtype="float16", scaled=True),
        "evaluate_every": 5,
    }
    data = images(tmp_path)
    train(launcher, tmp_path / "whole", 2, data, **changed)
    train(launcher, tmp_path / "cut", 2, data, stop_after=5, checkpoint=every(5), **changed)
    train(launcher, tmp_path / "cut", 2, data, checkpoint=every(5, resume="auto"), **changed)
    agree(tmp_path / "whole", tmp_path / "cut", exactly=True)
    kept = ("step", "split", "loss", "accuracy", "samples", "lr")
    one, two = (
        [{name: line.get(name) for name in kept} for line in read_metrics(str(tmp_path / name))]
        for name in ("whole", "cut")
    )
    assert one == two


def test_a_training_that_is_done_is_not_done_again(launcher: Launcher, tmp_path: Path) -> None:
    data = images(tmp_path)
    train(launcher, tmp_path / "run", 1, data, checkpoint=every(4))
    before = read_metrics(str(tmp_path / "run"))
    weights = (tmp_path / "run" / "weights.safetensors").read_bytes()
    train(launcher, tmp_path / "run", 2, data, checkpoint=every(4, resume="auto"))
    assert read_metrics(str(tmp_path / "run")) == before
    assert (tmp_path / "run" / "weights.safetensors").read_bytes() == weights


def test_by_the_clock(launcher: Launcher, tmp_path: Path) -> None:
    """Due at once: in each step that is logged, where the ranks agree on it, and at the end."""
    by_clock = p.CheckpointStep(seconds=1e-9, keep=9)
    train(launcher, tmp_path / "run", 2, images(tmp_path), checkpoint=by_clock, log_every=4)
    found = [files.look(path).manifest for path in files.checkpoints_in(str(tmp_path / "run" / "checkpoints"))]
    assert [manifest.step for manifest in found if manifest] == [10, 8, 4, 1]
    never = p.CheckpointStep(seconds=1e9)
    train(launcher, tmp_path / "other", 2, images(tmp_path), checkpoint=never)
    assert newest(tmp_path / "other").name == "step-00000010"
    assert len(files.checkpoints_in(str(tmp_path / "other" / "checkpoints"))) == 1


def test_another_run_directory_begins_with_the_next_step(launcher: Launcher, tmp_path: Path) -> None:
    data = images(tmp_path)
    train(launcher, tmp_path / "first", 2, data, stop_after=6, checkpoint=every(3))
    train(launcher, tmp_path / "whole", 2, data)
    one = str(tmp_path / "first" / "checkpoints" / "step-00000003")
    train(launcher, tmp_path / "second", 2, data, checkpoint=every(3, resume=one))
    assert curve(tmp_path / "second") == curve(tmp_path / "whole")[3:]
    newer = fails(launcher, tmp_path / "first", 2, data, checkpoint=every(3, resume=one))
    assert "step-00000006 is newer than the step to resume from, 3" in newer


def test_ctrl_c_and_on_from_there(launcher: Launcher, tmp_path: Path) -> None:
    """At whatever step it was stopped: the checkpoint is of that step."""
    data = images(tmp_path)
    long: dict[str, Any] = {"learning_rate": p.LearningRateStep(steps=10**6)}
    job = program(2, data, steps=10**6, log_every=50, evaluate_every=7, checkpoint=every(10**5), **long)
    run = write_program(job, places(2), tmp_path / "run")
    with Command(run) as command:
        command.wait_for("step       1/1000000")
        command.process.send_signal(signal.SIGINT)
        status, output = command.end()
    assert status == 130, output
    (manifest,) = (files.read_manifest(path) for path in files.checkpoints_in(str(run / "checkpoints")))
    assert f"stopped after {manifest.step} steps" in output
    assert manifest.samples == 16 * manifest.step
    end = manifest.step + 9
    for folder, checkpoint in ((run, every(10**5, resume="auto")), (tmp_path / "whole", every(10**5))):
        train(launcher, folder, 2, data, stop_after=end, evaluate_every=7, log_every=50, checkpoint=checkpoint, **long)
    found, wanted = (
        {(line["step"], line["split"]): line["loss"] for line in read_metrics(str(folder))}
        for folder in (run, tmp_path / "whole")
    )
    assert wanted.keys() == found.keys() - ({(manifest.step, "train")} - wanted.keys()), "logged where it stopped"
    assert all(found[key] == loss for key, loss in wanted.items())


# ------------------------------------------------------------------------------------------------ what is not whole


@pytest.fixture(scope="module")
def two_checkpoints(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of two ranks that ended after step 6, with checkpoints of steps 3 and 6; and the whole training."""
    folder = tmp_path_factory.mktemp("kept")
    data = images(folder)
    train(launcher, folder / "whole", 2, data)
    train(launcher, folder / "run", 2, data, stop_after=6, checkpoint=every(3))
    return folder


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGE: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "a flipped byte": (_flip, "__1_0.distcp", "__1_0.distcp has another checksum"),
    "a flipped byte of the metadata": (_flip, ".metadata", ".metadata has another checksum"),
    "a truncated file": (_truncate, "__0_0.distcp", "__0_0.distcp has"),
    "a missing file": (Path.unlink, "__0_0.distcp", "__0_0.distcp is missing"),
    "a missing manifest": (Path.unlink, "manifest.json", "it has no manifest.json"),
    "an empty manifest": (_empty, "manifest.json", "manifest.json cannot be read"),
    "a flipped byte of the manifest": (_flip, "manifest.json", "manifest.json"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_what_is_damaged_is_named_and_passed_over(
    launcher: Launcher, two_checkpoints: Path, tmp_path: Path, what: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(two_checkpoints / "run", run)
    harm, file, said = DAMAGE[what]
    harm(newest(run) / file)
    data = images(two_checkpoints)
    shown = train(launcher, run, 2, data, checkpoint=every(3, resume="auto"))
    assert "skipped" in shown and f"step-00000006: {said}" in notes(run)
    assert "resumes after step 3" in shown
    agree(two_checkpoints / "whole", run)
    assert all(
        (found := files.look(path)).manifest and not files.damage(path, found.manifest)
        for path in files.checkpoints_in(str(run / "checkpoints"))
    ), "the damaged one has been written anew"


def test_a_damaged_one_is_refused_where_it_is_named(launcher: Launcher, two_checkpoints: Path, tmp_path: Path) -> None:
    shutil.copytree(two_checkpoints / "run" / "checkpoints", tmp_path / "checkpoints")
    _flip(newest(tmp_path) / "__0_0.distcp")
    asked = every(3, resume=str(newest(tmp_path)))
    message = fails(launcher, tmp_path / "run", 2, images(two_checkpoints), checkpoint=asked)
    assert "__0_0.distcp has another checksum than when it was written" in message
    (tmp_path / "nothing").mkdir()
    asked = every(3, resume=str(tmp_path / "nothing"))
    message = fails(launcher, tmp_path / "other", 2, images(two_checkpoints), checkpoint=asked)
    assert message == f"there is no checkpoint in {tmp_path / 'nothing'}"


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"model": conv_model(8)}, "its `0.weight` is of shape 4 x 1 x 3 x 3, and the job's of 8 x 1 x 3"),
    "another optimizer": (
        {"optimizer": optimizer_step("AdamW", lr=0.01)},
        "its optimizer is SGD, and the job's AdamW",
    ),
    "no momentum": ({"optimizer": optimizer_step("SGD", lr=0.05)}, "its optimizer keeps momentum_buffer"),
    "a shorter training": ({"stop_after": 2}, "it is at step 6, and the job ends after 2"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_one_of_another_job_is_not_gone_on_from(
    launcher: Launcher, two_checkpoints: Path, tmp_path: Path, what: str
) -> None:
    changed, said = OTHERS[what]
    given = every(3, folder=str(two_checkpoints / "run" / "checkpoints"), resume="auto")
    message = fails(launcher, tmp_path / "run", 2, images(two_checkpoints), checkpoint=given, **changed)
    assert said in message


def test_other_samples_do_not_fit(two_checkpoints: Path) -> None:
    manifest = files.read_manifest(str(newest(two_checkpoints / "run")))
    data = images(two_checkpoints, batch=8, seed=1, shuffle=False)
    reasons = files.misfits(manifest, files.fit_of(program(2, data), manifest.fit.tensors), STEPS)
    assert reasons == [
        "its seed is 5, and the job's 1",
        "its shuffling is on, and the job's off",
        "its global batch is 16, and the job's 8",
        "its number of steps in an epoch is 6, and the job's 12",
    ]


def test_one_of_another_job_is_passed_over_for_an_older_one(
    launcher: Launcher, two_checkpoints: Path, tmp_path: Path
) -> None:
    run, data = tmp_path / "run", images(two_checkpoints)
    shutil.copytree(two_checkpoints / "run", run)
    train(launcher, tmp_path / "other", 1, data, stop_after=8, model=conv_model(8), checkpoint=every(8))
    shutil.copytree(newest(tmp_path / "other"), run / "checkpoints" / "step-00000008")
    train(launcher, run, 2, data, checkpoint=every(3, resume="auto"))
    assert "step-00000008: its `0.weight` is of shape 8 x 1 x 3 x 3" in notes(run)
    agree(two_checkpoints / "whole", run)


def test_a_folder_with_checkpoints_is_not_written_into(
    launcher: Launcher, two_checkpoints: Path, tmp_path: Path
) -> None:
    given = every(3, folder=str(two_checkpoints / "run" / "checkpoints"))
    message = fails(launcher, tmp_path / "run", 2, images(two_checkpoints), checkpoint=given)
    assert "holds checkpoints already (step-00000006): `checkpoint.resume = auto` continues" in message


def test_what_a_killed_training_left_is_cleared_away(launcher: Launcher, tmp_path: Path) -> None:
    for name in ("step-00000002.part", "step-00000001.gone"):
        (tmp_path / "run" / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "run" / "checkpoints" / name / "__0_0.distcp").write_text("half")
    shown = train(launcher, tmp_path / "run", 2, images(tmp_path), checkpoint=every(5, resume="auto"))
    assert "starts at the first step" in shown
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == ["step-00000005", "step-00000010"]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("often", [1, 2])
def test_the_second_checkpoint_in_a_row_that_cannot_be_written_ends_the_training(
    launcher: Launcher, tmp_path: Path, asynchronous: bool, often: int
) -> None:
    given = every(4, resume="auto", asynchronous=asynchronous, line="made.plt:9:3")
    (tmp_path / "own.py").write_text(FILLS)
    kept = tmp_path / "run" / "checkpoints"
    targets = [str(kept / f"step-0000000{step}.part") for step in (4, 8)][:often]
    model = p.ModelStep(python=p.PythonFunction(function="own:net", folder=str(tmp_path), arguments={"at": targets}))
    job = made(2, images(tmp_path), checkpoint=given, model=model, restarts=2)
    outcome, shown = launcher.launch(job, places(2), tmp_path / "run")
    assert outcome.restarts == 0, shown
    assert shown.count("the checkpoint of step 4 could not be written: ") == 1, shown
    if often == 1:
        assert outcome.is_complete, outcome.failure
        assert (kept / "step-00000008").is_dir()
        assert (kept / "step-00000010").is_dir()
        return
    assert outcome.failure.message.startswith("the checkpoint of step 8 could not be written: ")
    assert "neither could the one of step 4" in outcome.failure.message
    assert outcome.failure.notes[-1] == "not restarted: that would not mend it"
    told = read_status(str(tmp_path / "run"))
    assert told is not None and told.lasting
    assert outcome.failure.line == "made.plt:9:3"


def test_an_older_checkpoint_that_cannot_be_removed_is_told_and_ends_no_training(
    launcher: Launcher, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(FILLS)
    kept = tmp_path / "run" / "checkpoints"
    targets = [str(kept / "step-00000004.gone")]  # the name that it would have while it is removed
    model = p.ModelStep(python=p.PythonFunction(function="own:net", folder=str(tmp_path), arguments={"at": targets}))
    shown = train(launcher, tmp_path / "run", 2, images(tmp_path), checkpoint=every(4, keep=1), model=model)
    assert shown.count("step-00000004 could not be removed: ") == 1, shown
    assert "could not be written" not in shown
    names = [Path(path).name for path in files.checkpoints_in(str(kept))]
    assert names == ["step-00000010", "step-00000004"]


# A model that puts files where checkpoints are going to be written, in its second step.
FILLS = """
import os
from torch import nn

class Net(nn.Sequential):
    def __init__(self, at):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
        self.at, self.calls = at, 0
    def forward(self, x):
        self.calls += 1
        if self.calls == 2 and os.environ["RANK"] == "0":
            for path in self.at:
                open(path, "w").close()
        return super().forward(x)

def net(at):
    return Net(at)
"""


@pytest.mark.parametrize("left", [0, 4096, 100_000])
def test_a_checkpoint_on_a_full_disk_names_the_reason(tmp_path: Path, left: int) -> None:
    """Torch ends its archive after a failed write of a tensor, and says "unexpected pos 704 vs 598"."""
    tensors = {f"model.{number}": torch.randn(64, 500) for number in range(2)}
    with small_disk(tmp_path / "disk", "1m") as disk:
        (disk / "part").mkdir()
        os.truncate(fill(disk), (1 << 20) - left)
        with pytest.raises(CheckpointError, match=r"part cannot be written: OSError: .* No space left on device$"):
            write(str(disk / "part"), tensors, None)


def test_an_export_to_a_full_disk_names_the_reason_and_leaves_nothing(tmp_path: Path) -> None:
    save_file({"a": np.zeros((64, 500), np.float32)}, tmp_path / "a.safetensors")
    size = (tmp_path / "a.safetensors").stat().st_size
    with small_disk(tmp_path / "disk", "1m") as disk:
        os.truncate(fill(disk), (1 << 20) - size - 20_000)
        with pytest.raises(OSError, match="No space left on device"):
            export(str(tmp_path / "a.safetensors"), {}, str(disk / "a.pt"))
        assert os.listdir(disk) == ["filling"]


@pytest.mark.parametrize("name", ["step-00000004", "step-00000007.part", "step-00000007.gone"])
def test_what_is_no_checkpoint_is_neither_removed_nor_written_over(
    launcher: Launcher, tmp_path: Path, name: str
) -> None:
    """Also if another program gives its files such names."""
    theirs = tmp_path / "run" / "checkpoints" / name / "model.bin"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("another program's")
    message = fails(launcher, tmp_path / "run", 1, images(tmp_path), checkpoint=every(4, resume="auto"))
    assert message.startswith(f"{theirs.parent} holds something other than a checkpoint")
    assert theirs.read_text() == "another program's"


def test_of_a_checkpoint_that_is_a_link_the_link_is_removed(
    launcher: Launcher, two_checkpoints: Path, tmp_path: Path
) -> None:
    """By `keep`; and by a training that finds what an older version of dslc could not remove."""
    run, aside, data = tmp_path / "run", tmp_path / "aside", images(two_checkpoints)
    shutil.copytree(two_checkpoints / "run", run)
    there = run / "checkpoints"
    aside.mkdir()
    for name in ("step-00000003", "step-00000006"):
        shutil.move(there / name, aside / name)
        (there / name).symlink_to(aside / name)
    (there / "step-00000001.gone").symlink_to(aside / "step-00000003")
    (there / "step-00000009").symlink_to(aside / "nowhere")
    train(launcher, run, 2, data, checkpoint=every(3, keep=2, resume="auto"))
    agree(two_checkpoints / "whole", run)
    assert sorted(os.listdir(there)) == ["step-00000009", "step-00000010"]
    assert not any(path.is_symlink() for path in there.iterdir())
    for name in ("step-00000003", "step-00000006"):
        found = files.look(str(aside / name))
        assert found.manifest and not files.damage(found.path, found.manifest), "what the link points to is kept"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"step": 2, "split": "tr\x00\xff\n', "can't decode byte 0xff"),
        (b'{"step": 2, "spl\n', "Invalid control character"),
        (b"17\n", "it is not a record of a step"),
    ],
)
def test_a_damaged_line_of_the_metrics_is_named_and_left_out(
    launcher: Launcher, two_checkpoints: Path, tmp_path: Path, line: bytes, said: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(two_checkpoints / "run", run)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join([lines[0], line, *lines[2:]]))
    with pytest.raises(ValueError, match="line 2 cannot be read"):
        read_metrics(str(run))
    shown = train(launcher, run, 2, images(two_checkpoints), checkpoint=every(3, resume="auto"))
    assert "resumes after step 6" in shown
    assert "metrics.jsonl, line 2 cannot be read" in shown and said in notes(run)
    assert [step for step, _, _ in curve(run)] == [1, *range(3, STEPS + 1)]


# --------------------------------------------------------------------------------------------------- weights alone


def test_the_weights_alone(two_checkpoints: Path, launcher: Launcher, tmp_path: Path) -> None:
    train(launcher, tmp_path / "run", 2, images(tmp_path), checkpoint=every(STEPS))
    checkpoint = newest(tmp_path / "run")
    manifest, model = files.read_manifest(str(checkpoint)), build_model(conv_model(), "cpu")
    load_model(str(checkpoint), manifest, model)
    for name, value in load_file(tmp_path / "run" / "weights.safetensors").items():
        assert torch.equal(model.state_dict()[name], torch.from_numpy(value))
    with pytest.raises(CheckpointError, match=r"is not of this model: its `0\.weight` is of shape"):
        load_model(str(checkpoint), manifest, build_model(conv_model(8), "cpu"))


def test_a_manifest_is_json_without_torch(two_checkpoints: Path) -> None:
    told = json.loads((newest(two_checkpoints / "run") / "manifest.json").read_text())["manifest"]
    assert (told["step"], told["samples"], told["job"], told["plan_hash"]) == (6, 96, "made", "0")
    assert set(told["files"]) == {"__0_0.distcp", "__1_0.distcp", ".metadata"}


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("step", -5),
        ("step", "5"),
        ("step", True),
        ("samples", 2**80),
        ("seconds", -1.0),
        ("world_size", 1.5),
        ("next_rate", -0.1),
        ("files", {"a.distcp": {"size": -1, "checksum": "0"}}),
        ("goals", {"best": {"metric": "loss", "highest": False, "step": -5}}),
        ("fit", {"batch": -16}),
    ],
    ids=str,
)
def test_a_manifest_has_numbers_that_a_training_writes(tmp_path: Path, place: str, value: object) -> None:
    """Its checksum is right, so that nothing but the number can be the reason."""
    fit = files.Compatibility(
        tensors=None, optimizer="SGD", states=(), seed=-1, shuffle=True, batch=16, train_samples=64, steps_per_epoch=4
    )
    content: dict[str, Any] = to_json(
        files.Manifest(
            format=files.FORMAT, step=3, samples=48, seconds=1.5, job="made", plan_hash="0", world_size=1, fit=fit,
            files={"a.distcp": files.File(size=1, checksum="0")},
            goals={"best": files.Progress(metric="loss", highest=False, best=-2.0, step=2)},
        )
    )  # fmt: skip

    def look() -> files.CheckpointCandidate:
        text = json.dumps({"manifest": content, "checksum": files._checksum_of(content)})
        (tmp_path / "manifest.json").write_text(text)
        return files.look(str(tmp_path))

    assert look().manifest is not None, look().reason
    before = content[place]
    content[place] = before | value if isinstance(value, dict) and place == "fit" else value
    candidate = look()
    assert candidate.manifest is None and "manifest.json cannot be read" in candidate.reason, candidate
    assert place in candidate.reason, "the number is named"


def test_the_link_to_the_best_is_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    folder, link = str(tmp_path), tmp_path / files.BEST
    (tmp_path / "best.part").symlink_to("step-00000001")  # of a training that was killed
    for name in ("step-00000002", "step-00000004"):
        files.point(folder, name)
        assert os.readlink(link) == name and os.listdir(folder) == [files.BEST]
    assert not files.foreign(folder, best=True)
    files.point_nowhere(folder)
    link.mkdir()
    files.point_nowhere(folder)
    assert files.foreign(folder, best=True) == str(link) and not files.foreign(folder)
