"""The samples of the sources, their splits, and the errors for data that differs from the plan's."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dslc.compiler.ir.program import DataStep, PythonFunction
from dslc.runtime.data.collating import stacked
from dslc.runtime.data.samples import FetchedSamples, Part, SourceError, Splits, TensorSamples
from dslc.runtime.data.sources.open_sources import npz_array, open_source
from dslc.runtime.process.job_line import during


def data_step(source: str, samples: int, validation: int = 0, split: str = "none", **more: Any) -> DataStep:
    return DataStep(
        source=source,
        arguments=more.pop("arguments", {}),
        train_samples=samples - validation,
        validation_samples=validation,
        split=split,  # type: ignore[arg-type]
        seed=more.pop("seed", 0),
        shuffle=True,
        batch=4,
        last=0,
        workers=0,
        line="job.plt:9:3",
        **more,
    )


def everything(splits: Splits) -> tuple[torch.Tensor, torch.Tensor]:
    return splits.train.batch(torch.arange(len(splits.train)))


# ------------------------------------------------------------------------------------------------ digits and splits


def test_digits_are_those_of_the_repository() -> None:
    inputs, targets = everything(open_source(data_step("digits", 1797)))
    assert inputs.shape == (1797, 1, 8, 8) and inputs.dtype == torch.float32 and targets.dtype == torch.int64
    assert targets.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert (inputs[0, 0, 0] * 16).tolist() == [0, 0, 5, 13, 9, 1, 0, 0] and targets[:3].tolist() == [0, 1, 2]
    assert inputs.min() == 0 and inputs.max() == 1 and (inputs.double() * 16).sum() == 561718


def test_a_random_split_parts_the_samples() -> None:
    step = data_step("digits", 1797, 359, "random")
    splits = open_source(step)
    whole = everything(open_source(data_step("digits", 1797)))[0].flatten(1)
    held = splits.validation.batch(torch.arange(359))[0].flatten(1)
    both = torch.cat([everything(splits)[0].flatten(1), held])
    assert torch.equal(both.unique(dim=0), whole.unique(dim=0)) and len(both) == 1797
    other = open_source(data_step("digits", 1797, 359, "random", seed=1)).validation
    assert not torch.equal(other.batch(torch.arange(359))[0].flatten(1), held)


@pytest.mark.parametrize("planned", [1796, 1800])
def test_a_source_of_another_size_than_the_plan_is_refused(planned: int) -> None:
    with pytest.raises(SourceError, match=rf"job.plt:9:3: `digits` holds 1797 samples.* made for {planned}"):
        open_source(data_step("digits", planned))


# ------------------------------------------------------------------------------------------------------------- text


@given(st.binary(min_size=2, max_size=300), st.integers(1, 9))
def test_a_stream_is_cut_without_overlap_and_targets_follow(tmp_path_factory: Any, stream: bytes, context: int) -> None:
    samples = (len(stream) - 1) // context
    if not samples:
        return
    file = tmp_path_factory.getbasetemp() / "stream.txt"
    file.write_bytes(stream)
    step = data_step("text", samples, arguments={"file": str(file), "context": context})
    order = torch.arange(samples).flip(0)
    inputs, targets = open_source(step).train.batch(order)
    assert inputs.dtype == targets.dtype == torch.int64 and inputs.is_contiguous() and targets.is_contiguous()
    assert bytes(inputs.flip(0).flatten().tolist()) == stream[: samples * context]
    assert bytes(targets.flip(0).flatten().tolist()) == stream[1 : samples * context + 1]


def test_the_end_of_the_stream_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(bytes(range(101)))
    splits = open_source(data_step("text", 20, 4, "tail", arguments={"file": str(tmp_path / "t"), "context": 5}))
    assert everything(splits)[0].flatten().tolist() == list(range(80))
    assert splits.validation.batch(torch.tensor([3, 0]))[0].tolist() == [[95, 96, 97, 98, 99], [80, 81, 82, 83, 84]]


def test_the_standard_library_is_in_the_order_of_its_names() -> None:
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    samples = (sum(file.stat().st_size for file in files) - 1) // 64
    train = open_source(data_step("stdlib", samples, arguments={"context": 64})).train
    inputs, _ = train.batch(torch.arange(20))
    assert bytes(inputs.flatten().tolist()) == b"".join(file.read_bytes() for file in files[:4])[: 64 * 20]
    assert isinstance(train, Part) and isinstance(train.samples, TensorSamples)
    assert train.samples.inputs.dtype == torch.uint8, "a byte a token is kept in memory"


# ----------------------------------------------------------------------------------------------------------- arrays


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("kind", ["f2", "f4", ">f8", "u1", "i2", ">i4", "u4", "u8", "?", "g"])
def test_arrays_of_any_kind(tmp_path: Path, save: Any, kind: str) -> None:
    values = np.random.default_rng(0).integers(0, 2 if kind == "?" else 100, (9, 3, 2)).astype(kind)
    labels = np.array([3, -100, 0, 1, 2, 2, 2, 0, 1], "i2")
    save(tmp_path / "a.npz", images=np.asfortranarray(values) if kind == "f4" else values, y=labels)
    arguments = {"file": str(tmp_path / "a.npz"), "input": "images", "target": "y"}
    inputs, targets = open_source(data_step("arrays", 9, arguments=arguments)).train.batch(torch.tensor([8, 1, 1]))
    assert inputs.dtype == (torch.float32 if values.dtype.kind == "f" else torch.int64) and targets.dtype == torch.int64
    np.testing.assert_array_equal(inputs.numpy(), values[[8, 1, 1]].astype(inputs.numpy().dtype))
    assert targets.tolist() == [1, -100, -100]


def test_what_is_not_compressed_is_mapped_and_never_written(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    np.savez(file, x=np.zeros((4, 3), "f4"), y=np.zeros(4))
    before = file.read_bytes()
    mapped = npz_array(str(file), "x")
    assert any(str(file) in line for line in Path("/proc/self/maps").read_text().splitlines())
    mapped.fill_(1)
    assert file.read_bytes() == before


def test_arrays_that_do_not_go_together(tmp_path: Path) -> None:
    file = str(tmp_path / "a.npz")
    np.savez(file, x=np.zeros((4, 3)), y=np.zeros(5))
    with pytest.raises(SourceError, match="unequal length"):
        open_source(data_step("arrays", 4, arguments={"file": file, "input": "x", "target": "y"}))
    with pytest.raises(SourceError, match="no array `z`"):
        open_source(data_step("arrays", 4, arguments={"file": file, "input": "x", "target": "z"}))


# --------------------------------------------------------------------------------------------------- synthetic ones

SYNTHETIC: list[dict[str, Any]] = [
    {"shape": (2, 5, 7), "classes": 4},
    {"shape": (3,), "targets": (2, 2)},
    {"shape": (400, 3), "classes": 3},
    {"vocab": 50, "context": 9},
]


@pytest.mark.parametrize("arguments", SYNTHETIC)
def test_made_up_samples_depend_on_seed_and_index_alone(arguments: dict[str, Any], monkeypatch: Any) -> None:
    step = data_step("synthetic", 50, arguments={"samples": 50, **arguments})
    inputs, targets = everything(open_source(step))
    some = torch.tensor([49, 7, 7])
    monkeypatch.setattr("dslc.runtime.data.sources.synthetic.KEPT", 0)
    splits = open_source(step)
    assert isinstance(splits.train, Part) and not isinstance(splits.train.samples, TensorSamples)
    alone = splits.train.batch(some)
    assert torch.equal(alone[0], inputs[some]) and torch.equal(alone[1], targets[some])
    assert len(inputs.flatten(1).unique(dim=0)) > 40, "samples differ"
    assert inputs.dtype == (torch.int64 if "vocab" in arguments else torch.float32)
    other = everything(open_source(data_step("synthetic", 50, arguments={"samples": 50, **arguments}, seed=1)))
    assert not torch.equal(other[0], inputs)


def test_made_up_numbers_are_near_to_normal_and_the_same_on_any_machine() -> None:
    arguments = {"samples": 2000, "shape": (40,), "classes": 5}
    inputs, targets = everything(open_source(data_step("synthetic", 2000, arguments=arguments)))
    assert abs(inputs.mean()) < 0.01 and abs(inputs.std() - 1) < 0.01
    assert targets.bincount(minlength=5).min() > 200
    assert (inputs[0, :4] * 1000).round().tolist() == [1071, 540, 1043, 1564]
    assert targets[:8].tolist() == [1, 2, 0, 4, 2, 1, 1, 1]


def test_made_up_classes_follow_from_the_sample() -> None:
    arguments = {"samples": 1500, "shape": (30,), "classes": 3}
    inputs, targets = everything(open_source(data_step("synthetic", 1500, arguments=arguments)))
    model = torch.nn.Linear(30, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs[:1000]), targets[:1000]).backward()
        optimizer.step()
    assert (model(inputs[1000:]).argmax(1) == targets[1000:]).float().mean() > 0.9


def test_made_up_targets_follow_from_the_sample() -> None:
    arguments = {"samples": 300, "shape": (4, 5), "targets": (2,)}
    inputs, targets = everything(open_source(data_step("synthetic", 300, arguments=arguments)))
    flat = inputs.flatten(1)
    weights = torch.linalg.lstsq(flat[:200], targets[:200]).solution
    torch.testing.assert_close(flat[200:] @ weights, targets[200:], rtol=1e-4, atol=1e-4)
    assert 0.8 < targets.std() < 1.2


def test_made_up_tokens_follow_one_another() -> None:
    arguments = {"samples": 200, "vocab": 30, "context": 16}
    inputs, targets = everything(open_source(data_step("synthetic", 200, arguments=arguments)))
    assert torch.equal(inputs[:, 1:], targets[:, :-1]) and inputs.min() >= 0 and targets.max() < 30
    rises = (targets - inputs) % 30
    usual = rises.mode(1, keepdim=True).values
    assert set(usual.flatten().tolist()) == {1, 2, 3, 4}
    assert 0.8 < (rises == usual).float().mean() < 0.95


# -------------------------------------------------------------------------------------------------------- of a user

OWN = """
import sys, numpy, torch
from torch.utils.data import TensorDataset

class Squares:
    def __init__(self, size): self.size = size
    def __len__(self): return self.size
    def __getitem__(self, index):
        if not 0 <= index < self.size: raise IndexError(index)
        return numpy.full((2, 2), index, "f8"), index * index

def squares(size=6): return Squares(size)
def pair(): return Squares(6), Squares(3)
def arrays(): return numpy.arange(12.0).reshape(6, 2), torch.arange(6, dtype=torch.int16)
def two_pairs(): return arrays(), (torch.zeros(3, 2), torch.ones(3))
def tensors(): return TensorDataset(*map(torch.as_tensor, arrays()))
def uneven(): return [(torch.zeros(index + 1), 0) for index in range(6)]
def triples(): return [(0, 0, 0)] * 6
def stream(): return iter(range(6))
def holes(): return [(torch.zeros(2), None if index == 4 else index) for index in range(6)]
def words(): return [("a" if index == 4 else torch.zeros(2), index) for index in range(6)]
def narrow(): return [(torch.zeros(1 if index == 4 else 2), index) for index in range(6)]
def dicts(): return [{"x": torch.zeros(2), "y": None if index == 4 else index} for index in range(6)]

class Leaves(Squares):
    def __getitem__(self, index):
        if index == 4:
            sys.exit(3)
        return super().__getitem__(index)

def leaves(): return Leaves(6)
def nothing(): return [None if index == 4 else (torch.zeros(2), index) for index in range(6)]
def unpacked(samples): return torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "own_data", raising=False)
    (tmp_path / "own_data.py").write_text(OWN)

    def opened(name: str, samples: int = 6, validation: int = 0, split: str = "none", **arguments: Any) -> Splits:
        function = PythonFunction(function=f"own_data:{name}", arguments=arguments, folder=str(tmp_path))
        return open_source(data_step("python", samples, validation, split, python=function))

    return opened


def test_a_data_set_of_the_users_own_is_stacked(own: Any) -> None:
    inputs, targets = own("squares", samples=8, size=8).train.batch(torch.tensor([5, 2]))
    assert inputs.dtype == torch.float32 and inputs.shape == (2, 2, 2) and inputs[:, 0, 0].tolist() == [5, 2]
    assert targets.dtype == torch.int64 and targets.tolist() == [25, 4]


def test_a_pair_is_training_and_validation(own: Any) -> None:
    splits = own("pair", 9, 3, "given")
    assert isinstance(splits.train, FetchedSamples) and (len(splits.train), len(splits.validation)) == (6, 3)
    both = own("two_pairs", 9, 3, "given")
    assert isinstance(both.train, TensorSamples) and both.validation.batch(torch.tensor([2]))[1].tolist() == [1.0]
    with pytest.raises(SourceError, match="holds 6 training samples, and the plan was made for 5"):
        own("pair", 8, 3, "given")


@pytest.mark.parametrize("name", ["arrays", "tensors"])
def test_arrays_of_the_users_own_are_taken_whole(own: Any, name: str) -> None:
    train = own(name).train.samples
    assert isinstance(train, TensorSamples)
    assert train.inputs.dtype == torch.float32 and train.targets.dtype == torch.int64
    assert train.batch(torch.tensor([4]))[0].tolist() == [[8.0, 9.0]]


@pytest.mark.parametrize(
    ("name", "message"),
    [("uneven", "do not stack"), ("triples", r"a pair \(input, target\)"), ("stream", "needs `len` and indexing")],
)
def test_data_sets_that_will_not_do(own: Any, name: str, message: str) -> None:
    with pytest.raises(SourceError, match=f"job.plt:9:3: .*{message}"):
        own(name).train.batch(torch.arange(3))


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("holes", SourceError, "the target is None, and no tensor"),
        ("words", SourceError, "the input is a `str`, and no tensor"),
        ("narrow", SourceError, r"the input has shape \(1,\), and others \(2,\)"),
        ("leaves", SystemExit, "3"),
    ],
)
def test_the_sample_that_does_not_stack_is_named(own: Any, name: str, kind: type[BaseException], message: str) -> None:
    """One of its parts is no tensor, or of another shape; or reading it ends the process."""
    with pytest.raises(kind, match=message) as failure:
        own(name).train.batch(torch.tensor([5, 1, 4]))
    assert during(failure.value).startswith("`dataset[4]`")


@pytest.mark.parametrize(
    ("name", "collate", "message"),
    [("nothing", "own_data:unpacked", "cannot unpack"), ("dicts", "", r"\['y'\] is None, and no tensor")],
)
def test_the_sample_that_collate_fails_at_is_named(own: Any, name: str, collate: str, message: str) -> None:
    samples = own(name).train.samples.dataset
    function = getattr(sys.modules["own_data"], collate.partition(":")[2]) if collate else stacked
    fetched = FetchedSamples(samples, "job.plt:9:3", collate=function, whole=not collate)
    with pytest.raises((SourceError, TypeError), match=message) as failure:
        Part(fetched, length=6, split="training").batch(torch.tensor([5, 1, 4]))
    assert during(failure.value) == "`dataset[4]`, sample 4 of the training data"
