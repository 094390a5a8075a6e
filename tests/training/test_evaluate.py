"""From a checkpoint: `dslc evaluate`, `predict` and `export`, on other devices than it was written on."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.commands import dslc
from helpers.job_texts import job_text
from safetensors.torch import load_file, save_file
from torch import nn

from dslc.runtime.loop.predictions import PredictionPart, join

CONVNET = job_text(
    model={"network": "[conv2d(6, kernel = 3), batch_norm(), relu(), max_pool2d(2), flatten(), linear(10)]"},
    data={"source": "digits()", "batch": 100, "validation": "203/1797"},
    train={"epochs": 1, "optimizer": "sgd(lr = 0.05, momentum = 0.9)"},
    evaluate={"metrics": "[loss, accuracy]"},
    checkpoint={"every": "5 steps", "keep": 9},
    log=None,
)
GPT = job_text(
    model={"network": "gpt(layers = 2, width = 32, heads = 2, context = 16, vocab = 256, tie = true)"},
    data={"source": "synthetic(samples = 100, vocab = 256)", "batch": 8, "validation": "10%"},
    train={"steps": 3, "optimizer": "adamw(lr = 1e-3)"},
    checkpoint={"every": "3 steps"},
    log=None,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a job that was trained on two ranks, sharded, into `trained`, and its checkpoints in `runs`."""
    made = tmp_path_factory.mktemp("evaluate")
    (made / "job.plt").write_text(CONVNET)
    run = dslc("run", "job.plt", "--set", "devices.cpus=2", "--set", "parallelism.zero=3", cwd=made)
    assert run.returncode == 0, run.stdout + run.stderr
    yield made
    shutil.rmtree(made)


def run_of(folder: Path) -> Path:
    (run,) = (folder / "runs" / "job").iterdir()
    return run


def plain() -> nn.Module:
    """The network of the job, written without dslc."""
    layers = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(54, 10)).eval()


@pytest.mark.slow
@pytest.mark.parametrize("plan", [(), ("devices.cpus=3", "parallelism.zero=3")], ids=["one process", "3 ranks sharded"])
def test_an_evaluation_is_that_of_the_training(folder: Path, plan: tuple[str, ...]) -> None:
    settings = [word for setting in plan for word in ("--set", setting)]
    run = dslc("evaluate", "job.plt", "--json", "--checkpoint", run_of(folder) / "checkpoints", *settings, cwd=folder)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    lines = (run_of(folder) / "metrics.jsonl").read_text().splitlines()
    trained = next(r for r in map(json.loads, lines) if r["split"] == "validation")
    assert found["step"] == 15
    assert found["samples"] == 203
    assert found["accuracy"] == pytest.approx(trained["accuracy"], abs=1e-12)
    assert found["loss"] == pytest.approx(trained["loss"], rel=1e-6)


def test_predictions_are_in_the_order_of_the_source(folder: Path) -> None:
    """Two ranks with sharded parameters return every sample once, with the outputs of plain torch in one process."""
    output, weights = folder / "all.npz", folder / "weights.pt"
    place = run_of(folder) / "checkpoints" / "step-00000015"
    settings = ("--set", "devices.cpus=2", "--set", "parallelism.zero=3")
    run = dslc("predict", "job.plt", "-o", output, "--split", "all", "--checkpoint", place, *settings, cwd=folder)
    assert run.returncode == 0, run.stderr
    assert "output 1797 x 10" in run.stdout
    assert dslc("export", "job.plt", "-o", weights, "--checkpoint", place, cwd=folder).returncode == 0
    from dslc.runtime.data.sources.open_sources import digits

    model = plain()
    model.load_state_dict(torch.load(weights, weights_only=True))
    found = np.load(output)
    assert found["index"].tolist() == list(range(1797))
    assert found["output"].dtype == np.float32
    with torch.no_grad():
        expected = model(digits().batch(torch.arange(1797))[0]).numpy()
    np.testing.assert_allclose(found["output"], expected, atol=1e-5)
    assert [path.name for path in folder.glob(".dslc-*")] == [], "nothing is left beside it"


@pytest.mark.slow
def test_the_parts_of_a_split_are_those_of_the_whole(folder: Path) -> None:
    outputs = {}
    for split, suffix in (("validation", "safetensors"), ("train", "npz")):
        path = folder / f"{split}.{suffix}"
        settings = ("--set", "devices.cpus=2") if split == "train" else ()
        where = ("-o", path, "--checkpoint", run_of(folder))
        run = dslc("predict", "job.plt", *where, "--split", split, *settings, cwd=folder)
        assert run.returncode == 0, run.stderr
        outputs[split] = np.load(path) if suffix == "npz" else {k: v.numpy() for k, v in load_file(path).items()}
    assert len(outputs["validation"]["index"]) == 203
    both = np.concatenate([outputs["train"]["index"], outputs["validation"]["index"]])
    assert sorted(both.tolist()) == list(range(1797))
    assert outputs["validation"]["output"].shape == (203, 10)
    right = outputs["validation"]["output"].argmax(1)
    from dslc.runtime.data.sources.open_sources import digits

    targets = digits().targets.numpy()[outputs["validation"]["index"]]
    lines = (run_of(folder) / "metrics.jsonl").read_text().splitlines()
    trained = next(r for r in map(json.loads, lines) if r["split"] == "validation")
    assert (right == targets).mean() == pytest.approx(trained["accuracy"])


@pytest.mark.slow
def test_the_newest_is_taken_and_a_damaged_one_passed_over(folder: Path) -> None:
    assert "checkpoints/step-00000015 (step 15)" in dslc("evaluate", "job.plt", cwd=folder).stdout
    copied = folder / "copied"
    shutil.copytree(run_of(folder) / "checkpoints", copied)
    newest = copied / "step-00000015" / "__0_0.distcp"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    run = dslc("export", "job.plt", "-o", folder / "older.safetensors", "--checkpoint", copied, cwd=folder)
    assert run.returncode == 0
    assert "(step 10)" in run.stdout
    assert "skipped" in run.stderr
    assert "__0_0.distcp has another checksum" in run.stderr
    run = dslc("evaluate", "job.plt", "--checkpoint", copied / "step-00000015", cwd=folder)
    assert run.returncode == 2
    assert "is whole" in run.stderr


@pytest.mark.slow
def test_tied_weights_are_exported_for_plain_torch(tmp_path: Path) -> None:
    (tmp_path / "gpt.plt").write_text(GPT)
    assert dslc("run", "gpt.plt", cwd=tmp_path).returncode == 0
    place = tmp_path / "runs" / "gpt"
    (run,) = place.iterdir()
    os.remove(run / "weights.safetensors")
    exported = dslc("export", "gpt.plt", "-o", "a.safetensors", cwd=tmp_path)
    assert exported.returncode == 0 and "note: `head.weight` is `embedding.weight`" in exported.stdout
    assert dslc("export", "gpt.plt", "-o", "a.pt", cwd=tmp_path).returncode == 0
    once, all_names = load_file(tmp_path / "a.safetensors"), torch.load(tmp_path / "a.pt", weights_only=True)
    (tied,) = all_names.keys() - once.keys()
    assert any(torch.equal(value, all_names[tied]) for value in once.values()), "another name of a weight"
    assert all(torch.equal(once[name], all_names[name]) for name in once)


def test_what_is_not_there_or_does_not_fit_is_said(folder: Path) -> None:
    (folder / "other.plt").write_text(CONVNET)
    run = dslc("evaluate", "other.plt", cwd=folder)
    assert run.returncode == 2
    assert "there is no checkpoint of `other` in runs/other/*" in run.stderr
    assert dslc("predict", "job.plt", "-o", "a.csv", cwd=folder).returncode == 2
    for command in ("predict", "export"):
        run = dslc(command, "job.plt", "-o", "nowhere/a.safetensors", cwd=folder)
        assert run.returncode == 2
        assert "there is no folder" in run.stderr
    run = dslc("export", "job.plt", "-o", "a.pt", "--checkpoint", folder / "nowhere", cwd=folder)
    assert run.returncode == 2
    assert "there is no " in run.stderr
    wider = "model.network=[conv2d(8, kernel = 3), batch_norm(), relu(), max_pool2d(2), flatten(), linear(10)]"
    checkpoints = run_of(folder) / "checkpoints"
    run = dslc("evaluate", "job.plt", "--set", wider, "--checkpoint", checkpoints, cwd=folder)
    assert run.returncode == 1
    assert "its `0.weight` is of shape 6 x 1 x 3 x 3, and the job's of 8 x 1 x 3 x 3" in run.stderr
    run = dslc("evaluate", "job.plt", "--set", "data.validation=none", "--checkpoint", checkpoints, cwd=folder)
    assert run.returncode == 2
    assert "data.validation=10%" in run.stderr


def test_samples_that_the_training_has_seen_are_warned_of(folder: Path) -> None:
    run, seed = run_of(folder), ("--set", "train.seed=5")
    other = dslc("evaluate", "job.plt", *seed, cwd=folder)
    (setting,) = re.findall(r"has seen most of these: `--set (\S+)` takes its own", other.stderr)
    assert not dslc("evaluate", "job.plt", *seed, "--set", setting, "--checkpoint", run, cwd=folder).stderr
    tested = ("predict", "job.plt", "--set", "data.test=10%", "--split", "test", "-o", "test.npz")
    assert "the training held out no samples for `test`, and has seen these" in dslc(*tested, cwd=folder).stderr


def test_whether_it_would_be_gone_on_from(folder: Path) -> None:
    run = dslc("check", "job.plt", "--resume", run_of(folder), cwd=folder)
    assert run.returncode == 0, run.stderr
    assert "it would resume after step 15, from runs/job/" in run.stdout
    (folder / "net.py").write_text(
        "from torch import nn\n\ndef network():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    other = ("--resume", run_of(folder), "--set", 'model.network=python("net:network")')
    run = dslc("check", "job.plt", *other, cwd=folder)
    assert run.returncode == 0, "what was not looked at is said, and is no error"
    assert "warning[W0439]: the tensors of " in run.stderr and "`--trace` calls the function" in run.stderr
    assert "good as far as can be seen without its network (`--trace` looks at it)" in run.stdout
    run = dslc("check", "job.plt", "--trace", *other, cwd=folder)
    assert run.returncode == 1 and "error[E0903]" in run.stderr and "W0439" not in run.stderr
    own = f"checkpoint.dir={run_of(folder) / 'checkpoints'}"
    run = dslc("check", "job.plt", "--resume", run_of(folder), "--set", own, cwd=folder)
    assert "0811" not in run.stderr, "that it holds checkpoints already is what is asked for"
    wrong = {
        "data.batch=50": "E0905",
        "train.optimizer=adam(lr=0.1)": "E0904",
        "model.network=[flatten(), linear(10)]": "E0903",
        "train.seed=3": "E0905",
    }
    settings = [word for setting in wrong for word in ("--set", setting)]
    run = dslc("check", "job.plt", "--json", "--resume", run_of(folder), *settings, cwd=folder)
    assert run.returncode == 1
    found = {(each["file"], each["code"]) for each in json.loads(run.stdout) if each["severity"] == "error"}
    assert found == {(f"<--set {n}>", code) for n, code in enumerate(wrong.values(), 1)}, "each at what is to blame"
    run = dslc("check", "job.plt", "--resume", run_of(folder), "--set", "train.steps=4", cwd=folder)
    assert run.returncode == 1
    assert "error[E0906]" in run.stderr
    assert "--> <--set 1>" in run.stderr
    shutil.copytree(run_of(folder) / "checkpoints", folder / "cut")
    os.truncate(folder / "cut" / "step-00000015" / ".metadata", 10)
    run = dslc("check", "job.plt", "--resume", folder / "cut", cwd=folder)
    assert run.returncode == 0
    assert "warning[W0902]" in run.stderr
    assert "after step 10" in run.stdout
    run = dslc("check", "job.plt", "--resume", folder / "cut" / "step-00000015", cwd=folder)
    assert run.returncode == 1
    assert "error[E0902]" in run.stderr
    assert "error[E0901]" in dslc("check", "job.plt", "--resume", folder, cwd=folder).stderr


BROKEN = """
import torch


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, number):
        if number == 15:
            raise OSError("the disk is gone")
        return torch.ones(4), torch.tensor(number % 2)
"""
OWN_DATA = job_text(
    model={"network": "[linear(2)]"}, data={"source": 'python("broken:Data")', "batch": 4}, train={"steps": 1}, log=None
)


@pytest.mark.slow
def test_a_prediction_that_fails_is_named_and_leaves_its_logs(tmp_path: Path) -> None:
    (tmp_path / "job.plt").write_text(OWN_DATA)
    (tmp_path / "broken.py").write_text(BROKEN)
    save_file({"0.weight": torch.ones(2, 4), "0.bias": torch.zeros(2)}, tmp_path / "some.safetensors")
    words = ("predict", "job.plt", "-o", "all.npz", "--split", "all", "--checkpoint", "some.safetensors")
    run = dslc(*words, cwd=tmp_path)
    assert run.returncode == 3, run.stdout + run.stderr
    assert run.stderr.startswith("`predict` failed on rank 0") and "the disk is gone" in run.stderr
    (left,) = tmp_path.glob(".dslc-predict-*")
    assert (left / "logs" / "rank-0.log").exists()
    shutil.rmtree(left)
    whole = BROKEN.replace("number == 15", "False")  # of another size: within a second Python would not see it
    (tmp_path / "broken.py").write_text(whole)
    run = dslc(*words, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert not list(tmp_path.glob(".dslc-predict-*"))


STRUCTURED = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x):
        scores = self.head(x)
        return {"loss": scores.square().mean(), "scores": scores, "best": [scores.argmax(1)]}


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, number):
        return {"x": torch.tensor([number, 0.0, 0.0, 1.0])}
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
def test_each_tensor_of_an_output_is_written_that_has_a_row_for_each_sample(tmp_path: Path, ending: str) -> None:
    text = OWN_DATA.replace("[linear(2)]", 'python("own:Net")').replace("cross_entropy", "own").replace("broken", "own")
    (tmp_path / "job.plt").write_text(text)
    (tmp_path / "own.py").write_text(STRUCTURED)
    weight, bias = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 1]]), torch.tensor([0.0, 3.5])
    save_file({"head.weight": weight, "head.bias": bias}, tmp_path / "some.safetensors")
    words = ("--split", "all", "--checkpoint", "some.safetensors", "--set", "devices.cpus=4")
    run = dslc("predict", "job.plt", "-o", f"all{ending}", *words, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"all{ending}: output.scores 10 x 2, output.best.0 10 of" in run.stdout
    found = np.load(tmp_path / "all.npz") if ending == ".npz" else load_file(tmp_path / "all.safetensors")
    assert sorted(found) == ["index", "output.best.0", "output.scores"]
    assert str(found["output.best.0"].dtype)[-5:] == "int64" and str(found["output.scores"].dtype)[-7:] == "float32"
    assert found["output.scores"].tolist() == [[float(n), 4.5] for n in range(10)]
    assert found["output.best.0"].tolist() == [1] * 5 + [0] * 5 and found["index"].tolist() == list(range(10))


def test_parts_of_unlike_ranks_are_named(tmp_path: Path) -> None:
    for rank, width in enumerate((2, 0, 3)):
        with PredictionPart(str(tmp_path), rank) as part:
            if width:
                part.add({"output": np.zeros((4, width), np.float32)}, np.arange(4))
    with pytest.raises(
        ValueError, match=r"`output` is numbers of shape \(3,\) for each sample on rank 2, and .* rank 0"
    ):
        join(str(tmp_path), 3, str(tmp_path / "all.npz"))
    assert join(str(tmp_path), 2, str(tmp_path / "all.npz")) == {"output": (4, 2)}
    with PredictionPart(str(tmp_path), 0) as part:
        part.add({"output": np.zeros((4, 2))}, np.arange(4))
        with pytest.raises(ValueError, match="padded to one length"):
            part.add({"output": np.zeros((4, 3))}, np.arange(4))
