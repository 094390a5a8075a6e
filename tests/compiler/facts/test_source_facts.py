"""The facts of a source agree with the samples that the runtime finds when it opens it."""

from __future__ import annotations

import glob
import io
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import made_data
from helpers.paths import ROOT

from dslc.compiler.facts.file_patterns import files_matching
from dslc.compiler.facts.sample_numbers import count_of
from dslc.compiler.facts.source_look import UnusableDataError
from dslc.compiler.facts.sources import source_facts, source_key
from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.program import DataStep
from dslc.compiler.ir.tensors import TensorFact
from dslc.dsl.language import calls as c
from dslc.dsl.language.registry import Call
from dslc.runtime.data.sources.open_sources import open_source


def opened(source: Call, facts: SourceFacts, context: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first samples, from the runtime, which refuses another number of samples than `facts` says."""
    assert facts.samples is not None
    name, arguments = source_key(source)
    arguments |= facts.found
    if context is not None:
        arguments["context"] = context
    step = DataStep(
        source=name,
        arguments=arguments,
        train_samples=facts.samples,
        validation_samples=facts.validation_samples or 0,
        split="none" if facts.validation_samples is None else "given",
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
    made_data.llm_c(tmp_path / "gpt2-0.bin", np.arange(300, dtype="<u2"), 300)
    made_data.llm_c(tmp_path / "gpt2-1.bin", np.arange(41, dtype="<u2"), 300)
    made_data.llm_c(tmp_path / "llama.bin", np.arange(100, dtype="<u4"))
    (tmp_path / "nano.bin").write_bytes(np.arange(50, dtype="<u2").tobytes())
    made_data.mnist(tmp_path / "mnist")
    made_data.mnist(tmp_path / "torchvision" / "MNIST" / "raw", packed=True)
    made_data.cifar10(tmp_path / "cifar")
    made_data.cifar10(tmp_path / "archive" / "cifar-10-batches-bin", binary=True)
    made_data.pictures(tmp_path / "pictures", 4)
    for split in ("train", "val"):
        made_data.pictures(tmp_path / "parted" / split, 5)
    return tmp_path


def source(kind: Any, folder: Path, arguments: dict[str, Any]) -> Call:
    paths = ("file", "files", "folder", "dir")
    made = {name: str(folder / value) if name in paths else value for name, value in arguments.items()}
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
        (c.Tokens, {"files": "nano.bin"}),
        (c.Tokens, {"files": "gpt2-*.bin"}),
        (c.Tokens, {"files": "llama.bin", "context": 7}),
        (c.MNIST, {"dir": "mnist"}),
        (c.MNIST, {"dir": "torchvision"}),
        (c.CIFAR10, {"dir": "cifar"}),
        (c.CIFAR10, {"dir": "archive"}),
        (c.Images, {"folder": "pictures", "size": 6}),
        (c.Images, {"folder": "parted", "size": 20}),
    ],
)
def test_the_facts_are_what_the_runtime_finds(files: Path, kind: type[Call], arguments: dict[str, Any]) -> None:
    call = source(kind, files, arguments)
    facts = source_facts(call, 20)
    sequences = kind in (c.Stdlib, c.Text, c.Tokens) or "vocab" in arguments
    context = arguments.get("context", 20) if sequences else None
    inputs, targets = opened(call, facts, context)
    assert not facts.missing
    for tensor, fact in ((inputs, facts.input), (targets, facts.target)):
        assert fact is not None and tensor.shape[1:] == fact.shape and str(tensor.dtype) == f"torch.{fact.dtype}"
    if facts.classes is not None and len(targets):
        assert targets.min() >= 0 and targets.max() < facts.classes
    assert facts.stream == (kind in (c.Stdlib, c.Text, c.Tokens))


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
        (c.Text, {"file": "."}, "is not a file"),
        (c.Tokens, {"files": "none*.bin"}, "no file matches"),
        (c.Arrays, {"file": "none.npz"}, "there is no"),
        (c.Arrays, {"file": "t.txt"}, "not a readable `.npz` file"),
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
        assert "is not a readable `.npz` file" in facts.missing and facts.samples is None


@pytest.mark.parametrize("packed", [False, True])
def test_an_array_that_has_less_than_it_says_is_refused(tmp_path: Path, packed: bool) -> None:
    """As 100 bytes that would need 373 GiB; a `.npy` file of weights likewise."""
    np.lib.format.write_array_header_1_0(
        whole := io.BytesIO(), {"descr": "<f4", "fortran_order": False, "shape": (10**11,)}
    )
    content = whole.getvalue() + bytes(100)
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archive:
        for name in ("x", "y"):
            archive.writestr(f"{name}.npy", content)
    facts = source_facts(c.Arrays(file=str(tmp_path / "a.npz")), None)
    assert facts.missing is not None and "is not a readable `.npz` file" in facts.missing
    assert "an array of 100 bytes, whose header says 100,000,000,000 numbers of 4 bytes" in (facts.help or "")
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(UnusableDataError):
        count_of(str(tmp_path / "a.npy"), "a.npy")


@pytest.mark.parametrize("call", [c.PythonSource(function="a:b"), c.Parquet(files="*.parquet"), c.Datasets(path="x")])
def test_what_takes_a_library_or_the_users_code_is_not_looked_at_here(call: Call) -> None:
    assert source_facts(call, 8) == SourceFacts()


def test_a_data_set_cannot_be_streamed() -> None:
    assert source_facts(c.Datasets(path="x", arguments=(("streaming", True),)), 8).code == "E0315"


# --------------------------------------------------------------------------------- files that are not what they were


def said(kind: Any, beside: Path, code: str = "E0311", **arguments: Any) -> str:
    facts = source_facts(source(kind, beside, arguments), 20)
    assert facts.code == code and facts.help and facts.samples is None
    assert facts.input is not None, "what does not depend on the files is known"
    return facts.missing


def test_a_vocabulary_is_known_where_every_header_says_it(tmp_path: Path) -> None:
    made_data.llm_c(tmp_path / "a.bin", np.arange(90, dtype="<u2"), 90)
    made_data.llm_c(tmp_path / "b.bin", np.arange(50, dtype="<u2"), 50)
    assert source_facts(source(c.Tokens, tmp_path, {"files": "*.bin"}), 8).vocab == 90
    made_data.llm_c(tmp_path / "c.bin", np.arange(50, dtype="<u2"))
    assert source_facts(source(c.Tokens, tmp_path, {"files": "*.bin"}), 8).vocab is None


def test_files_of_tokens_that_are_not_right(tmp_path: Path) -> None:
    whole = made_data.llm_c(tmp_path / "a.bin", np.arange(90, dtype="<u2"), 90).read_bytes()
    (tmp_path / "a.bin").write_bytes(whole[:-10])
    assert re.search(
        r"a.bin holds 1,194 bytes, .* 90 tokens, which take 1,204", said(c.Tokens, tmp_path, files="*.bin")
    )
    made_data.llm_c(tmp_path / "a.bin", np.arange(90, dtype="<u2"), version=3)
    assert "of version 3" in said(c.Tokens, tmp_path, files="*.bin")
    (tmp_path / "a.bin").write_bytes(bytes(31))
    assert "31 bytes" in said(c.Tokens, tmp_path, files="*.bin")
    (tmp_path / "a.bin").write_bytes(bytes(30))
    made_data.llm_c(tmp_path / "b.bin", np.arange(90, dtype="<u4"))
    assert "in different forms" in said(c.Tokens, tmp_path, files="*.bin")
    (tmp_path / "d.bin").mkdir()
    assert "is not a file" in said(c.Tokens, tmp_path, "E0309", files="d.bin")


def test_of_many_files_of_tokens_few_headers_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(200):
        made_data.llm_c(tmp_path / f"{n:03}.bin", np.arange(100 + n, dtype="<u2"), 300)
    opened: list[str] = []

    def counting(file: Any, *rest: Any, real: Any = open) -> Any:
        opened.append(str(file))
        return real(file, *rest)

    monkeypatch.setattr("builtins.open", counting)
    facts = source_facts(source(c.Tokens, tmp_path, {"files": "*.bin"}), 10)
    assert facts.samples == sum((99 + n) // 10 for n in range(200)) and facts.vocab == 300
    assert len(opened) < 70


def test_folders_of_images_that_are_not_right(files: Path) -> None:
    assert "holds no folder of images" in said(c.Images, files, folder="pictures/cat")
    assert "is not a folder" in said(c.Images, files, folder="t.txt")
    (files / "pictures" / "empty").mkdir()
    assert re.search("pictures/empty holds no image", said(c.Images, files, folder="pictures"))
    (files / "parted" / "val" / "bird").mkdir()
    assert "differ in their classes: bird" in said(c.Images, files, folder="parted")


def test_images_behind_links_that_lead_back_or_to_no_file_are_said(files: Path) -> None:
    cats = files / "pictures" / "cat"
    (cats / "up").symlink_to("..")
    assert "cat/up is a link to a folder that it is in" in said(c.Images, files, folder="pictures")
    (cats / "up").unlink()
    (cats / "in").mkdir()
    (cats / "in" / "again").symlink_to(cats, target_is_directory=True)
    assert "in/again is a link to a folder that it is in" in said(c.Images, files, folder="pictures")
    (cats / "in" / "again").unlink()
    os.mkfifo(cats / "in" / "a.png")
    assert "a.png has the name of an image, and is no file" in said(c.Images, files, folder="pictures")
    (cats / "in" / "a.png").unlink()
    for n in range(16):  # two links to the next folder: 2 ** 16 ways through all of them
        (files / f"chain{n}").mkdir()
        for name in "ab":
            (files / f"chain{n}" / name).symlink_to(files / f"chain{n + 1}", target_is_directory=True)
    (files / "chain16").mkdir()
    (cats / "in" / "on").symlink_to(files / "chain0", target_is_directory=True)
    assert "more than 20,000 folders of images for one class" in said(c.Images, files, folder="pictures")


@pytest.mark.slow
def test_a_pattern_of_stars_ends(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "here").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "b").symlink_to(tmp_path, target_is_directory=True)
    assert "it looks at more than 200,000 files and folders" in said(c.Tokens, tmp_path, files="*/" * 30)


@pytest.mark.parametrize("pattern", ["*/*.py", "d*/*/E00*.md", "./R*", "*/none", "README.md", "*/../*.md", ".*", "*/"])
def test_a_pattern_matches_what_glob_does(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert files_matching(pattern) == sorted(glob.glob(pattern))


def test_files_of_mnist_that_are_not_right(files: Path) -> None:
    images, labels = (files / "mnist" / f"t10k-{name}-ubyte" for name in ("images-idx3", "labels-idx1"))
    whole = images.read_bytes()
    images.write_bytes(whole[:-1])
    assert "and its header says 7,856" in said(c.MNIST, files, dir="mnist")
    images.write_bytes(labels.read_bytes())
    assert "is not an IDX file of images" in said(c.MNIST, files, dir="mnist")
    images.write_bytes(whole)
    labels.write_bytes(labels.read_bytes()[:7] + bytes([9]) + bytes(9))
    assert "holds 10 images, and" in said(c.MNIST, files, dir="mnist")
    labels.unlink()
    assert "there is no" in said(c.MNIST, files, "E0309", dir="mnist")
    packed = files / "torchvision" / "MNIST" / "raw" / "train-images-idx3-ubyte.gz"
    packed.write_bytes(b"none of this is gzip")
    assert "cannot be read" in said(c.MNIST, files, dir="torchvision")


def test_batches_of_cifar10_that_are_not_right(files: Path) -> None:
    batch = files / "cifar" / "data_batch_3"
    batch.write_bytes(batch.read_bytes()[:2000])
    assert "data_batch_3 is not a batch of CIFAR-10" in said(c.CIFAR10, files, dir="cifar")
    batch.write_bytes(b"hello")
    assert "data_batch_3 is not a batch of CIFAR-10" in said(c.CIFAR10, files, dir="cifar")
    batch.unlink()
    assert "there is no" in said(c.CIFAR10, files, "E0309", dir="cifar")
    binary = files / "archive" / "cifar-10-batches-bin" / "test_batch.bin"
    binary.write_bytes(bytes(3074))
    assert "not a whole number of images" in said(c.CIFAR10, files, dir="archive")


@pytest.mark.processes
def test_looking_loads_neither_numpy_nor_torch(files: Path) -> None:
    code = (
        "import sys; from dslc.compiler.facts.sources import source_facts; from dslc.dsl.language.calls import *\n"
        f"assert source_facts(Arrays(file={str(files / 'a.npz')!r}), 1).samples == 7\n"
        f"assert source_facts(MNIST(dir={str(files / 'mnist')!r}), 1).samples == 48\n"
        f"assert source_facts(CIFAR10(dir={str(files / 'cifar')!r}), 1).samples == 70\n"
        f"assert source_facts(Images(folder={str(files / 'pictures')!r}), 1).samples == 8\n"
        "assert not {'numpy', 'torch', 'lark', 'networkx', 'PIL', 'pyarrow', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
