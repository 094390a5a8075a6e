"""Rules for initial weights: folders and indices of `save_pretrained`, files of torch, patterns, and remedies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.made_jobs import make_job
from safetensors.torch import save_file

from dslc.compiler.facts.weights_file import Unreadable, entries_of, files_of
from dslc.compiler.ir.facts import Facts, SourceFacts
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.model.opaque import opaque
from dslc.compiler.rules.analyse import analyse
from dslc.compiler.rules.model.weights import expected_tensors
from dslc.compiler.trace.trace_model import trace_model
from dslc.dsl.diagnostics import Diagnostic, Report
from dslc.dsl.language import calls as c
from dslc.dsl.language.blocks import ModelSpec
from dslc.dsl.language.layers import Flatten, Linear, PythonNetwork
from dslc.probe.trace_network import open_weights
from dslc.probe.trial import Files, Trial

NETWORK = (Flatten(), Linear(features=4), Linear(features=10))
SHAPES = {"1.weight": (4, 64), "1.bias": (4,), "2.weight": (10, 4), "2.bias": (10,)}


def tensors(prefix: str = "") -> dict[str, torch.Tensor]:
    return {prefix + name: torch.zeros(shape) for name, shape in SHAPES.items()}


def told(path: Path, facts: Facts | None = None, **patterns: Any) -> list[Diagnostic]:
    weights = c.Pretrained(path=str(path), **patterns) if patterns else str(path)
    model, report = ModelSpec(network=NETWORK, loss=c.CrossEntropy(), weights=weights), Report()
    report.collect(analyse(make_job(model=model), facts or Facts()))
    return report.found


def sharded(folder: Path, **changed: Any) -> Path:
    """Writes two shards and their index, as `save_pretrained` does."""
    whole = tensors()
    names = {name: f"model-0000{n // 2 + 1}-of-00002.safetensors" for n, name in enumerate(whole)}
    for file in set(names.values()):
        save_file({name: whole[name] for name in whole if names[name] == file}, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": names | changed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_the_forms_of_a_saved_model(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "many", "run")]
    for folder in folders:
        folder.mkdir()
    save_file(tensors(), folders[0] / "model.safetensors")
    sharded(folders[1])
    save_file(tensors(), folders[2] / "weights.safetensors")
    for path in (*folders, folders[0] / "model.safetensors", folders[1] / "model.safetensors.index.json"):
        assert told(path) == []
        assert {name: entry.shape for name, entry in entries_of(files_of(str(path))).items()} == SHAPES


@pytest.mark.parametrize(
    "changed",
    (
        {"1.bias": "absent.safetensors"},
        {"1.bias": "model-00002-of-00002.safetensors"},  # another shard holds it
        {"3.bias": "model-00002-of-00002.safetensors"},
        {"1.bias": "../model-00001-of-00002.safetensors"},
        {"1.bias": 3},
    ),
)
def test_an_index_that_is_wrong(changed: dict[str, Any], tmp_path: Path) -> None:
    sharded(tmp_path, **changed)
    if changed == {"1.bias": "model-00002-of-00002.safetensors"}:
        assert told(tmp_path) == []  # it is in one of the files all the same
        return
    assert [d.code for d in told(tmp_path)] == ["W0712"]
    with pytest.raises(Unreadable):
        entries_of(files_of(str(tmp_path)))


@pytest.mark.processes
def test_files_of_torch_are_opened_in_a_run(tmp_path: Path) -> None:
    good, bad, code = (tmp_path / f"{name}.bin" for name in ("good", "bad", "code"))
    torch.save(tensors(), good)
    torch.save({"state_dict": tensors() | {"3.weight": torch.zeros(2)}}, bad)
    torch.save({"a": Path}, code)
    assert told(bad) == []  # only torch reads it
    report = Report()
    for path, expected in ((good, []), (bad, ["E0713"]), (code, [])):
        job = make_job(model=ModelSpec(network=NETWORK, loss=c.CrossEntropy(), weights=str(path)))
        trial = Trial(job=job, facts=Facts(), files=Files(""))
        assert [d.code for d in told(path, (report.collect(open_weights(trial)) or trial).facts)] == expected
    assert [d.code for d in report] == ["W0712"] and "code.bin cannot be read as weights" in report.found[0].message


@pytest.mark.parametrize(
    ("there", "patterns", "codes"),
    [
        (tensors(), {"only": ("1.*",)}, []),
        (tensors(), {"only": ("one.*",)}, ["E0724"]),
        (tensors(), {"only": ("1.*", "one.*")}, ["W0724"]),
        (tensors(), {"allow_missing": ("head.*",)}, ["E0724"]),
        (tensors(), {"allow_missing": ("2.*", "head.*")}, ["W0724"]),
        (tensors(), {"rename": ("a.* -> *.*",)}, ["E0726"]),
        (tensors("model."), {"rename": ("model.* -> *",)}, []),
        (tensors("model."), {"allow_missing": ("*",), "allow_unused": ("*",)}, ["E0725"]),
        (tensors() | {"2.bias": torch.zeros(3)}, {"allow_missing": ("2.bias",)}, []),
        (tensors() | {"2.bias": torch.zeros(3)}, {"allow_missing": ("2.weight",)}, ["E0713"]),
    ],
)
def test_parts(there: dict[str, torch.Tensor], patterns: dict[str, Any], codes: list[str], tmp_path: Path) -> None:
    save_file(there, tmp_path / "a.safetensors")
    assert [d.code for d in told(tmp_path / "a.safetensors", **patterns)] == codes


@pytest.mark.parametrize(
    ("there", "remedy"),
    [
        (tensors("model."), 'rename = ["model.* -> *"]'),
        ({name.removeprefix("1."): t for name, t in tensors().items()}, 'rename = ["weight -> 1.weight"]'),
        ({name.replace("weight", "wieght"): t for name, t in tensors().items()}, 'rename = ["1.wieght -> 1.weight"]'),
        ({name: t for name, t in tensors().items() if name[0] != "2"}, 'allow_missing = ["2.*"]'),
        (tensors() | {"2.weight": torch.zeros(9, 4), "2.bias": torch.zeros(9)}, 'allow_missing = ["2.*"]'),
        (tensors() | {"pooler.0.weight": torch.zeros(2)}, 'allow_unused = ["pooler.*"]'),
    ],
)
def test_the_remedy_mends_it(there: dict[str, torch.Tensor], remedy: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(there, path)
    (diagnostic,) = told(path)
    assert diagnostic.code == "E0713" and f'pretrained("…", {remedy})' in diagnostic.help
    field, _, pattern = remedy.partition(" = ")
    patterns: dict[str, Any] = {field: tuple(json.loads(pattern))}
    assert " -> 1." in remedy or not told(path, None, **patterns)  # these name one tensor of two


class Net(torch.nn.Module):
    kept: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(4, 2)
        self.register_buffer("kept", torch.zeros(4))
        self.register_buffer("table", torch.zeros(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(x + self.kept + self.table)
        return result


def test_a_saved_buffer_is_wanted_and_another_is_not() -> None:
    sample, target = TensorFact(shape=(4,), dtype="float32"), TensorFact(shape=(), dtype="int64")
    spec = ModelSpec(network=PythonNetwork(function="net:make"), loss=c.CrossEntropy())
    graph = Report().collect(
        opaque(trace_model(Net, sample), spec, SourceFacts(input=sample, target=target, classes=2))
    )
    assert graph is not None and expected_tensors(graph).keys() == {"head.weight", "head.bias", "kept"}
