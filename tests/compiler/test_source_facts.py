"""What is learnt of a source by looking is what the runtime finds when it opens it."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dslc.compiler.facts import SourceFacts, TensorFact
from dslc.compiler.program import DataStep
from dslc.compiler.sources import source_facts, source_key
from dslc.dsl import calls as c
from dslc.dsl.registry import Call
from dslc.runtime.sources import open_source


def opened(source: Call, facts: SourceFacts, context: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The first samples, from the runtime, which refuses another number of samples than `facts` says."""
    assert facts.samples is not None
    name, arguments = source_key(source)
    if context is not None:
        arguments["context"] = context
    step = DataStep(
        source=name,
        arguments=arguments,
        train_samples=facts.samples,
        validation_samples=0,
        split="none",
        seed=0,
        shuffle=False,
        batch=1,
        last=0,
        workers=0,
    )
    return open_source(step).train.batch(torch.arange(min(facts.samples, 50)))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "t.txt").write_bytes(b"abc" * 40)
    labels, flags = np.zeros(7, "i2"), np.zeros((7, 2), "?")
    np.savez(tmp_path / "a.npz", x=np.zeros((7, 3, 2), "f8"), y=labels, b=flags, s=np.float32(1))
    np.savez_compressed(tmp_path / "z.npz", x=np.zeros((7, 3), ">u2"), y=np.zeros((7, 4), "f2"))
    np.savez(tmp_path / "text.npz", x=np.zeros(7), y=np.array(["a"] * 7))
    return tmp_path


def source(kind: Any, folder: Path, arguments: dict[str, Any]) -> Call:
    made = {name: str(folder / value) if name in ("file", "files") else value for name, value in arguments.items()}
    call: Call = kind(**made)
    return call


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (c.Digits, {}),
        (c.Stdlib, {}),
        (c.Stdlib, {"context": 33}),
        (c.Text, {"file": "t.txt"}),
        (c.Text, {"file": "t.txt", "context": 119}),
        (c.Text, {"file": "t.txt", "context": 120}),
        (c.Arrays, {"file": "a.npz"}),
        (c.Arrays, {"file": "a.npz", "target": "b"}),
        (c.Arrays, {"file": "z.npz"}),
        (c.Synthetic, {"shape": (3, 4), "classes": 5}),
        (c.Synthetic, {"shape": (3,)}),
        (c.Synthetic, {"samples": 60, "shape": (3,), "targets": (2, 1)}),
        (c.Synthetic, {"samples": 9, "vocab": 12}),
    ],
)
def test_the_facts_are_what_the_runtime_finds(files: Path, kind: type[Call], arguments: dict[str, Any]) -> None:
    call = source(kind, files, arguments)
    facts = source_facts(call, 20)
    context = None if kind in (c.Digits, c.Arrays) or "shape" in arguments else arguments.get("context", 20)
    inputs, targets = opened(call, facts, context)
    assert not facts.missing
    for tensor, fact in ((inputs, facts.input), (targets, facts.target)):
        assert fact is not None and tensor.shape[1:] == fact.shape and str(tensor.dtype) == f"torch.{fact.dtype}"
    if facts.classes is not None and len(targets):
        assert targets.min() >= 0 and targets.max() < facts.classes
    assert facts.stream == (kind in (c.Stdlib, c.Text))


def test_the_second_form_of_an_arrays_header(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "v2.npz", "w") as archive:
        for name in "xy":
            with archive.open(f"{name}.npy", "w") as stream:
                np.lib.format.write_array(stream, np.zeros((3, 2)), version=(2, 0))
    call = source(c.Arrays, tmp_path, {"file": "v2.npz"})
    facts = source_facts(call, None)
    assert facts.samples == 3 and facts.input == TensorFact(shape=(2,), dtype="float32")
    assert opened(call, facts, None)[0].shape == (3, 2)


def test_made_up_numbers_have_two_classes_unless_the_job_says() -> None:
    assert source_facts(source(c.Synthetic, Path(), {"shape": (3,)}), None).classes == 2


def test_files_of_tokens_are_counted_one_by_one(tmp_path: Path) -> None:
    for name, tokens in (("a.bin", 21), ("b.bin", 40), ("c.bin", 3)):
        (tmp_path / name).write_bytes(bytes(2 * tokens))
    facts = source_facts(source(c.Tokens, tmp_path, {"files": "*.bin"}), 10)
    assert facts.samples == 2 + 3 + 0 and facts.stream and facts.vocab is None
    assert facts.input == TensorFact(shape=(10,), dtype="int64")


def test_a_length_that_is_unknown_leaves_the_samples_unknown() -> None:
    stdlib, tokens = source(c.Stdlib, Path(), {}), source(c.Synthetic, Path(), {"vocab": 7})
    assert source_facts(stdlib, None) == SourceFacts(classes=256, vocab=256, stream=True)
    assert source_facts(tokens, None) == SourceFacts(samples=1024, classes=7, vocab=7)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (c.Text, {"file": "none.txt"}, "there is no .*none.txt"),
        (c.Text, {"file": "."}, "is no file"),
        (c.Tokens, {"files": "*.bin"}, "no file matches"),
        (c.Arrays, {"file": "none.npz"}, "there is no"),
        (c.Arrays, {"file": "t.txt"}, "no `.npz` file"),
        (c.Arrays, {"file": "a.npz", "input": "q"}, "has no array `q`"),
        (c.Arrays, {"file": "a.npz", "input": "s"}, "`s` has shape no shape"),
        (c.Arrays, {"file": "text.npz"}, "`y` of .* does not hold numbers"),
    ],
)
def test_what_is_not_there_is_said(files: Path, kind: type[Call], arguments: dict[str, Any], message: str) -> None:
    facts = source_facts(source(kind, files, arguments), 20)
    assert re.search(message, facts.missing) and facts.help and facts.samples is None
    if kind is not c.Arrays:
        assert facts.input == TensorFact(shape=(20,), dtype="int64"), "what does not depend on the files is known"


def test_a_cut_off_file_is_said(files: Path) -> None:
    whole = (files / "a.npz").read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 5):
        (files / "cut.npz").write_bytes(whole[:length])
        facts = source_facts(source(c.Arrays, files, {"file": "cut.npz"}), None)
        assert "no `.npz` file that can be read" in facts.missing and facts.samples is None


@pytest.mark.parametrize(
    ("kind", "arguments"), [(c.Images, {"folder": "x"}), (c.MNIST, {"dir": "x"}), (c.PythonSource, {"function": "a:b"})]
)
def test_other_sources_are_not_looked_at(kind: type[Call], arguments: dict[str, Any]) -> None:
    assert source_facts(source(kind, Path(), arguments), 8) == SourceFacts()


def test_looking_loads_neither_numpy_nor_torch(files: Path) -> None:
    code = (
        "import sys; from dslc.compiler.sources import source_facts; from dslc.dsl.calls import *\n"
        f"assert source_facts(Arrays(file={str(files / 'a.npz')!r}), 1).samples == 7\n"
        "assert not {'numpy', 'torch', 'lark', 'networkx'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
