"""Files of tensors: tensors written one by one are read back by the library and by the reader of headers."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from dslc.compiler.facts.weights_file import entries
from dslc.compiler.ir.facts import TensorEntry
from dslc.runtime.checkpoint.export import export
from dslc.runtime.checkpoint.state import CheckpointError
from dslc.runtime.checkpoint.tensor_file import StoredTensor, writing
from dslc.runtime.checkpoint.weights import DTYPES, entry, write_tensor

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
tensors = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(sorted(DTYPES, key=str)), shapes),
    max_size=5,
)


def made(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(0, 2, shape).to(dtype)


@settings(max_examples=50, deadline=None)
@given(drawn=tensors)
def test_what_is_written_is_what_is_read(drawn: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    wanted = {name: made(*each) for name, each in drawn.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "a.safetensors")
        with writing(path, {name: entry(tensor) for name, tensor in wanted.items()}, {"format": "pt"}) as file:
            for tensor in wanted.values():
                write_tensor(file, tensor)
        assert os.listdir(folder) == ["a.safetensors"]
        assert os.path.getsize(path) % 8 == sum(map(nbytes, wanted.values())) % 8, "the numbers begin at a whole word"
        told = {name: TensorEntry(dtype=DTYPES[t.dtype], shape=tuple(t.shape)) for name, t in wanted.items()}
        assert entries(path) == told
        with safe_open(path, framework="pt") as read:
            assert read.metadata() == {"format": "pt"}
            found = {name: read.get_tensor(name) for name in read.offset_keys()}
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def test_the_sizes_of_numbers_are_those_of_torch() -> None:
    assert all(StoredTensor(dtype=name, shape=()).bytes == dtype.itemsize for dtype, name in DTYPES.items())


@pytest.mark.parametrize("written", [b"1234", b"123456789"], ids=["less", "more"])
def test_a_file_of_another_length_is_not_made(tmp_path: Path, written: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"from before")
    told = {"a": StoredTensor(dtype="I64", shape=(1,))}
    with (
        pytest.raises(AssertionError, match="bytes were written, and the header says 8"),
        writing(str(path), told) as f,
    ):
        f.write(written)
    assert path.read_bytes() == b"from before" and os.listdir(tmp_path) == ["a.safetensors"]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "none" / "a.safetensors")
    with pytest.raises(FileNotFoundError, match=r"none/a\.safetensors"), writing(path, {}):
        pass


def test_a_file_of_torch_holds_each_tensor_once_and_no_more(tmp_path: Path) -> None:
    """Its tensors are parts of one file in memory, of which torch would write the whole for each."""
    whole, plain = tmp_path / "a.safetensors", tmp_path / "a.pt"
    state = {"b": torch.arange(10_000.0), "a": torch.ones(100, 100, dtype=torch.bfloat16), "e": torch.empty(0, 3)}
    save_file(state, whole)
    assert export(str(whole), {"tied": "b"}, str(plain)) == 4
    assert plain.stat().st_size < whole.stat().st_size + 4_000
    read = torch.load(plain)
    assert all(torch.equal(read[name], tensor) for name, tensor in state.items())
    assert read["tied"].data_ptr() == read["b"].data_ptr()
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "a.safetensors"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 64,
        (2**40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        b"\2" + b"\0" * 7 + b"{",
    ],
    ids=["empty", "garbage", "a long header", "a list", "cut off"],
)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_file_that_is_none_is_not_exported(tmp_path: Path, content: bytes, suffix: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"/a\.safetensors cannot be read as safetensors: "):
        export(str(tmp_path / "a.safetensors"), {}, str(tmp_path / f"b{suffix}"))
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_predictions_are_joined_without_torch() -> None:
    code = "import sys, dslc.runtime.loop.predictions; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
