"""Jobs of programs: texts, settings as values, and objects in place of `python(…)`, which need no module."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dslc
from dslc.compiler.ir.program import PythonFunction
from dslc.python_api.python_objects import object_settings, settings_of, text_of
from dslc.runtime.process.user_code import load_function

TEXT = """
model {
  network = [flatten(), linear(3)]
  loss    = cross_entropy()
}
data {
  source     = synthetic(samples = 40, shape = [6], classes = 3)
  batch      = 8
  validation = 20%
}
devices { cpus = 2 }
train {
  steps     = 4
  optimizer = sgd(lr = 0.1)
}
log { every = 1 step }
"""


class Samples(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(6, generator=torch.Generator().manual_seed(index)), index % 3


def objects() -> dict[str, Any]:
    """Objects that no other process can import."""
    width = 5

    class Plain(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 0.25) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(p.grad, alpha=-group["lr"])

    return {
        "network": lambda: nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3)),
        "source": Samples(),
        "loss": lambda output, target: nn.functional.cross_entropy(output, target, reduction="none"),
        "optimizer": Plain,
    }


def test_a_text_with_objects_trains_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    told: list[dict[str, Any]] = []
    here = threading.get_ident()

    def callback(record: dict[str, Any]) -> None:
        assert threading.get_ident() == here
        told.append(record)

    given = objects()
    result = dslc.run(TEXT, set={"train.steps": 3}, out="run", quiet=True, callback=callback, **given)
    assert capfd.readouterr() == ("", "")
    assert told == list(result.metrics) and [record["step"] for record in told] == [1, 2, 3, 3]
    assert told[0]["lr"] == 0.25, "the optimizer's own"
    assert result.module[0].out_features == 5  # type: ignore[index]
    assert not list(tmp_path.glob("*.plt")), "nothing is left"
    assert 'network = python(function = "dslc_given:network")' in Path("run/job.plt").read_text()
    with pytest.raises(ImportError, match="`network` was given by a program: give it again"):
        load_function(PythonFunction(function="dslc_given:network"))


@pytest.mark.long
def test_what_a_program_trained_is_used_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = objects()
    result = dslc.run(TEXT, out="run", quiet=True, **given)
    found = dslc.evaluate(TEXT, checkpoint="run", **given)
    assert found["loss"] == pytest.approx(result.metrics[-1]["loss"])
    assert dslc.predict(TEXT, "made.npz", checkpoint="run", split="all", **given) == "made.npz"
    assert np.load("made.npz")["output"].shape == (40, 3)
    assert dslc.export(TEXT, "made.pt", checkpoint="run", **given) == "made.pt"
    assert torch.load("made.pt")["0.weight"].shape == (5, 6)
    verified = dslc.verify(TEXT, steps=2, **given)
    assert verified.holds and "the plan trains as one process does" in verified.text
    path = dslc.render(TEXT, "plan.dot", network=given["network"])
    assert Path(path).read_text().startswith("digraph")


def test_objects_are_passed_to_the_same_fields_again(tmp_path: Path) -> None:
    """Instances of modules are copied, and several hooks and loggers have names of their own."""
    network = nn.Linear(6, 3)
    with object_settings({"network": network, "hooks": [print, len], "metrics": ["loss"], "loss": None}) as settings:
        assert settings == [
            'model.network=python("dslc_given:network")',
            'train.hooks=[python("dslc_given:hooks_0"), python("dslc_given:hooks_1")]',
            "evaluate.metrics=[loss]",
        ]
        import dslc_given  # type: ignore[import-not-found]

        assert dslc_given.network() is not network and dslc_given.network().weight.equal(network.weight)
    with pytest.raises(ImportError):
        import dslc_given


def test_an_object_that_cannot_be_passed_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match="`loss` cannot be passed to the processes of the ranks: cannot pickle"):
        dslc.check(TEXT, loss=lambda output, target: lock)
    with pytest.raises(TypeError, match="there is no `model` to give; there are network, loss"):
        dslc.check(TEXT, model=nn.Linear)
    with pytest.raises(TypeError, match="`settings` is a list of texts"):
        dslc.check(TEXT, "train.steps=3")


def test_mistakes_are_errors_with_their_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(dslc.JobError) as raised:
        dslc.evaluate(TEXT, set={"data.batch": -1})
    assert [each.code for each in raised.value.diagnostics] == ["E0125"] and "E0125" in str(raised.value)
    with pytest.raises(dslc.JobError) as raised:
        dslc.run(TEXT, network=lambda: nn.Linear(5, 3))
    assert "`dslc_given:network` cannot be used as a model" in str(raised.value)
    with pytest.raises(dslc.CommandError, match="nowhere"):
        dslc.evaluate(TEXT, checkpoint="nowhere")


@pytest.mark.slow
def test_an_exception_of_the_callback_ends_the_training(tmp_path: Path) -> None:
    def callback(record: dict[str, Any]) -> None:
        raise LookupError(f"enough at {record['step']}")

    with pytest.raises(LookupError, match="enough at 1"):
        dslc.run(TEXT, set={"train.steps": 20_000}, out=str(tmp_path / "run"), quiet=True, callback=callback)


def test_settings_are_values_of_the_language() -> None:
    values = {"a": 3, "b": 1e-5, "c": True, "d": None, "e": "bf16", "f": [1, 2], "g": Path("a b"), "h": np.float32(0.5)}
    assert settings_of(values) == ["a=3", "b=1e-05", "c=true", "d=none", "e=bf16", "f=[1, 2]", 'g="a b"', "h=0.5"]
    with pytest.raises(TypeError, match="a dict is not a value of the language"):
        text_of({})
