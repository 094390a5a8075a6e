"""The samples of files are correct, and no more of a file is read than is asked for."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import made_data
from hypothesis import given, settings
from hypothesis import strategies as st

from dslc.compiler.facts.sources import source_facts, source_key
from dslc.compiler.ir.program import DataStep
from dslc.dsl.language import calls as c
from dslc.dsl.language.registry import Call
from dslc.runtime.data.images import decoded
from dslc.runtime.data.sampler import micro_batches, permutation
from dslc.runtime.data.samples import SourceError
from dslc.runtime.data.sources import tables
from dslc.runtime.data.sources.open_sources import open_source
from dslc.runtime.data.sources.table_sources import ParquetFiles


def step_for(call: Call, facts: Any = None, context: int = 10, **more: Any) -> DataStep:
    """Returns a step over all samples of a source."""
    name, arguments = source_key(call)
    facts = facts or source_facts(call, context)
    validation = facts.validation_samples or 0
    return DataStep(
        source=name,
        arguments=arguments | dict(facts.found) | {"context": context} | more.pop("arguments", {}),
        train_samples=facts.samples,
        validation_samples=validation,
        split="given" if validation else "none",
        seed=more.pop("seed", 0),
        shuffle=True,
        batch=4,
        last=0,
        workers=0,
        line="job.plt:9:3",
        **more,
    )


# ------------------------------------------------------------------------------------------------------- tokens


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 45), min_size=1, max_size=4),
    st.sampled_from(["<u2", "<u4"]),
    st.randoms(use_true_random=False),
)
def test_sequences_follow_one_another_within_each_file(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], item: str, random: Any
) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    numbers, expected = 60_000 if item == "<u2" else 3_000_000_000, []
    for n, length in enumerate(lengths):
        tokens = (np.arange(length) + numbers + 100 * n).astype(item)
        made_data.llm_c(folder / f"{n}.bin", tokens)
        expected += [tokens[at : at + 11].tolist() for at in range(0, length - 10, 10)]
    if not expected:
        return
    train = open_source(step_for(c.Tokens(files=str(folder / "*.bin")))).train
    order = list(range(len(expected)))
    random.shuffle(order)
    inputs, targets = train.batch(torch.tensor(order))
    assert inputs.dtype == targets.dtype == torch.int64
    assert [[*row, last] for row, last in zip(inputs.tolist(), targets[:, -1].tolist(), strict=True)] == [
        expected[n] for n in order
    ]
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_files_of_tokens_are_mapped_when_they_are_asked_for(tmp_path: Path) -> None:
    for n in range(3):
        np.full(101, n, "<u2").tofile(tmp_path / f"{n}.bin")
    step = step_for(c.Tokens(files=str(tmp_path / "*.bin")))
    train = open_source(step).train
    (tmp_path / "1.bin").unlink()
    assert train.batch(torch.tensor([2, 25]))[0][:, 0].tolist() == [0, 2]
    with pytest.raises(FileNotFoundError, match=r"1\.bin"):
        train.batch(torch.tensor([12]))


def test_a_file_of_tokens_that_changed_since_the_plan_is_refused(tmp_path: Path) -> None:
    file = made_data.llm_c(tmp_path / "a.bin", np.arange(101, dtype="<u2"))
    step = step_for(c.Tokens(files=str(file)))
    made_data.llm_c(file, np.arange(100, dtype="<u2"))
    with pytest.raises(SourceError, match=r"job.plt:9:3: .*a.bin has a size of 1224, .* for 1226 bytes"):
        open_source(step)
    made_data.llm_c(file, np.arange(101, dtype="<u2"), version=2)
    with pytest.raises(SourceError, match="is not the file of 101 uint16 tokens"):
        open_source(step).train.batch(torch.tensor([0]))


def test_a_token_beyond_the_vocabulary_is_named_before_the_network_sees_it(tmp_path: Path) -> None:
    tokens = np.zeros(101, "<u2")
    tokens[35] = 77
    tokens.tofile(tmp_path / "a.bin")
    limits = {"model_vocab": 77, "model_classes": None, "ignore": -100}
    train = open_source(step_for(c.Tokens(files=str(tmp_path / "*.bin")), arguments=limits)).train
    train.batch(torch.tensor([0, 1, 2, 4]))
    with pytest.raises(SourceError, match=r"sample 3 of .*a\.bin has the token 77, and .* a vocabulary of 77: 0 to 76"):
        train.batch(torch.tensor([0, 3]))


# ------------------------------------------------------------------------------------------- MNIST and CIFAR-10


@pytest.mark.parametrize("packed", [False, True])
def test_mnist(tmp_path: Path, packed: bool) -> None:
    made_data.mnist(tmp_path / "m", packed=packed)
    splits = open_source(step_for(c.MNIST(dir=str(tmp_path / "m"))))
    pixels, labels = made_data.learnable(48, 784, 10)
    inputs, targets = splits.train.batch(torch.tensor([47, 3]))
    np.testing.assert_array_equal(inputs.numpy().reshape(2, -1), pixels[[47, 3]].astype(np.float32) / np.float32(255))
    assert targets.tolist() == labels[[47, 3]].tolist() and inputs.shape == (2, 1, 28, 28)
    assert len(splits.validation) == 10
    assert isinstance(splits.train.images.base, np.memmap) != packed  # type: ignore[attr-defined]


@pytest.mark.parametrize("form", ["python", "binary", "python 3"])
def test_cifar10(tmp_path: Path, form: str) -> None:
    folder = made_data.cifar10(tmp_path / "c", binary=form == "binary")
    if form == "python 3":  # protocol 2 of Python 3 writes the pixels as text, which cannot be mapped
        for file in folder.iterdir():
            file.write_bytes(pickle.dumps(pickle.loads(file.read_bytes(), encoding="bytes"), protocol=2))
    splits = open_source(step_for(c.CIFAR10(dir=str(folder))))
    pixels, labels = made_data.learnable(13, 3072, 10)  # of data_batch_2
    inputs, targets = splits.train.batch(torch.tensor([12, 0, 24]))
    np.testing.assert_array_equal(inputs[2].flatten(), pixels[12].astype(np.float32) / np.float32(255))
    assert int(targets[2]) == labels[12] and inputs.shape == (3, 3, 32, 32)
    assert torch.equal(splits.train.batch(torch.tensor([0]))[0][0], inputs[1])
    assert (len(splits.train), len(splits.validation)) == (12 + 13 + 14 + 15 + 16, 17)
    first = splits.train._opened(0)  # type: ignore[attr-defined]
    assert isinstance(first.images.base, np.memmap) == (form != "python 3")


class Trap:
    def __reduce__(self) -> Any:
        return print, ("a pickle was obeyed",)


def test_a_pickle_that_calls_anything_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = made_data.cifar10(tmp_path / "c")
    step = step_for(c.CIFAR10(dir=str(folder)))
    made = pickle.loads((folder / "data_batch_4").read_bytes(), encoding="bytes")
    (folder / "data_batch_4").write_bytes(pickle.dumps(made | {"trap": Trap()}, protocol=2))
    with pytest.raises(SourceError, match=r"data_batch_4 is not a batch of CIFAR-10: it names \w+\.print"):
        open_source(step)
    assert "obeyed" not in capfd.readouterr().out


# ------------------------------------------------------------------------------------------------------- images


def test_images_are_fitted_and_numbered_by_class(tmp_path: Path) -> None:
    from PIL import Image

    made_data.pictures(tmp_path / "p", 3, ("a", "b"))
    (tmp_path / "p" / "b" / "below").mkdir()
    Image.new("L", (9, 30), 128).save(tmp_path / "p" / "b" / "below" / "x.PNG")
    (tmp_path / "p" / "notes.txt").write_text("no class")
    train = open_source(step_for(c.Images(folder=str(tmp_path / "p"), size=6))).train
    assert len(train) == 7
    inputs, targets = train.batch(torch.arange(7))
    assert inputs.shape == (7, 3, 6, 6) and targets.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert inputs.min() >= 0 and inputs.max() <= 1
    assert torch.allclose(inputs[6], torch.full((3, 6, 6), 128 / 255))
    whole = Image.open(tmp_path / "p" / "a" / "001.png").convert("RGB")  # 13 x 13
    fitted = np.asarray(whole.resize((6, 6), Image.Resampling.BILINEAR), np.float32).transpose(2, 0, 1) / 255
    np.testing.assert_allclose(inputs[1].numpy(), fitted, atol=1e-6)


def test_a_picture_is_cropped_around_its_middle(tmp_path: Path) -> None:
    from PIL import Image

    pixels = np.zeros((4, 8, 3), np.uint8)
    pixels[:, 2:6] = 255
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert decoded(tmp_path / "a.png", "RGB", 4).min() == 1
    assert decoded(tmp_path / "a.png", "L", None).shape == (1, 4, 8)


def test_a_picture_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    made_data.pictures(tmp_path / "p", 3)
    broken = tmp_path / "p" / "dog" / "001.png"
    broken.write_bytes(broken.read_bytes()[:90])
    train = open_source(step_for(c.Images(folder=str(tmp_path / "p"), size=6))).train
    train.batch(torch.tensor([0, 5]))
    with pytest.raises(SourceError, match=r"job.plt:9:3: .*dog/001.png cannot be decoded"):
        train.batch(torch.tensor([4]))


# ------------------------------------------------------------------------------------------------------ Parquet


@dataclasses.dataclass
class Facts:
    samples: int
    found: dict[str, Any]
    validation_samples: int | None = None


def parquet_step(folder: Path, **more: Any) -> DataStep:
    call = c.Parquet(files=str(folder / "*.parquet"))
    facts = tables.parquet_facts(call.files, call.input, call.target, None)
    return step_for(call, Facts(facts["samples"], facts["found"]), **more)


def test_blocks_of_a_parquet_file_are_read_once_an_epoch_and_few_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "BLOCK", 1)  # each row group is a block
    monkeypatch.setattr(tables, "WINDOW", 1200)
    made_data.parquet(tmp_path / "p", files=3, rows=50, group=5)
    step = parquet_step(tmp_path / "p")
    blocks, window = step.arguments["blocks"], step.arguments["window"]
    assert blocks == (5,) * 30 and 2 <= window <= 8
    samples = ParquetFiles(step)
    seen = torch.cat([samples.batch(piece)[0] for piece in permutation(step, 0).split(10)])
    everything = ParquetFiles(step).batch(torch.arange(150))[0]
    assert torch.equal(seen.unique(dim=0), everything.unique(dim=0)) and len(seen) == 150
    assert not torch.equal(seen, everything)
    assert samples.reads <= 30 + 30 // window, "a block that two windows of a batch share may be read again"
    assert samples._opened.cache_info().currsize <= window + 1


@settings(max_examples=50)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 4), st.integers(0, 3), st.data())
def test_an_order_by_blocks_visits_every_sample_once(blocks: list[int], window: int, seed: int, data: Any) -> None:
    total = sum(blocks)
    validation = data.draw(st.integers(0, total - 1))
    step = DataStep(
        source="parquet", arguments={"blocks": tuple(blocks), "window": window}, train_samples=total - validation,
        validation_samples=validation, split="random" if validation else "none", seed=seed, shuffle=True, batch=1,
        last=0, workers=0,
    )  # fmt: skip
    order = permutation(step, 1)
    assert sorted(order.tolist()) == list(range(total - validation))
    assert torch.equal(order, permutation(step, 1))


def test_the_order_by_blocks_is_that_of_a_resumed_run_and_of_any_ranks(tmp_path: Path) -> None:
    made_data.parquet(tmp_path / "p", group=4)
    step = dataclasses.replace(parquet_step(tmp_path / "p", seed=3), batch=8)
    from dslc.compiler.ir.program import RankPlace

    def of(ranks: int, epoch: int, k: int) -> list[int]:
        places = [
            RankPlace(rank=r, node=0, local_rank=r, coordinates={}, data_rank=r, data_ranks=ranks) for r in range(ranks)
        ]
        return [n for place in places for piece in micro_batches(step, place, 2, epoch, k) for n in piece.tolist()]

    assert of(1, 4, 3) == of(2, 4, 3) == of(4, 4, 3) != of(1, 5, 3)


def test_columns_of_every_kind(tmp_path: Path) -> None:
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    def png(shade: int) -> bytes:
        held = io.BytesIO()
        Image.new("L", (5, 4), shade).save(held, "png")
        return held.getvalue()

    made = {
        "whole": pa.array([1, 2, 3], pa.uint8()),
        "truth": pa.array([True, False, True]),
        "real": pa.array([0.5, 1.5, 2.5], pa.float64()),
        "matrix": pa.array([[[n, 1], [2, 3], [4, 5]] for n in range(3)], pa.list_(pa.list_(pa.int32()))),
        "fixed": pa.array([[n, 1.0] for n in range(3)], pa.list_(pa.float32(), 2)),
        "bytes": pa.array([png(n) for n in range(3)]),
        "picture": pa.array([{"bytes": png(n), "path": None} for n in range(3)]),
    }
    pq.write_table(pa.table(made), tmp_path / "a.parquet", row_group_size=2)
    expected: dict[str, tuple[str, Any]] = {
        "whole": ("int64", [3, 1]),
        "truth": ("int64", [1, 1]),
        "real": ("float32", [2.5, 0.5]),
        "matrix": ("int64", [[[2, 1], [2, 3], [4, 5]], [[0, 1], [2, 3], [4, 5]]]),
        "fixed": ("float32", [[2, 1], [0, 1]]),
        "bytes": ("float32", np.stack([np.full((1, 4, 5), n / 255) for n in (2, 0)])),
        "whole real truth": ("float32", [[3, 2.5, 1], [1, 0.5, 1]]),
        "whole truth": ("int64", [[3, 1], [1, 1]]),
        "picture": ("float32", np.stack([np.full((1, 4, 5), n / 255) for n in (2, 0)])),
    }
    for name, (dtype, rows) in expected.items():
        columns = tuple(name.split(" "))
        facts = tables.parquet_facts(str(tmp_path / "a.parquet"), columns, ("whole",), None)
        call = c.Parquet(files=str(tmp_path / "a.parquet"), input=columns, target=("whole",))
        inputs, targets = open_source(step_for(call, Facts(3, facts["found"]))).train.batch(torch.tensor([2, 0]))
        assert str(inputs.dtype) == f"torch.{dtype}" == f"torch.{facts['input']['dtype']}"
        assert list(inputs.shape[1:]) == facts["input"]["shape"]
        np.testing.assert_allclose(inputs.numpy(), rows, rtol=1e-6)
        assert targets.tolist() == [3, 1]


@pytest.mark.parametrize(
    ("rows", "words"),
    [([[1.0, 2.0], [1.0]], "lists of 1 to 2, and the first row's holds 2"), ([[1.0], None], "a row has no value"),
     ([[1.0], [None]], "a number is missing")],
)  # fmt: skip
def test_rows_that_differ_from_the_first_are_named(tmp_path: Path, rows: Any, words: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": pa.array(rows, pa.list_(pa.float32())), "y": [0, 1]}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=rf"job.plt:9:3: .*a.parquet: column `x`: {words}"):
        open_source(parquet_step(tmp_path)).train.batch(torch.tensor([0, 1]))


def test_a_picture_in_a_table_that_cannot_be_decoded_is_told_with_its_column(tmp_path: Path) -> None:
    import io
    import struct
    import zlib

    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    whole = io.BytesIO()
    Image.new("RGB", (4, 4)).save(whole, "png")
    # A header that tells of more pixels than Pillow decodes: it raises an error that is no OSError.
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0))
    huge = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
    pq.write_table(pa.table({"x": [whole.getvalue(), huge], "y": [0, 1]}), tmp_path / "a.parquet")
    rows = open_source(parquet_step(tmp_path)).train
    with pytest.raises(SourceError, match=r"job.plt:9:3: .*a.parquet: column `x`: Image size"):
        rows.batch(torch.tensor([0, 1]))


# ------------------------------------------------------------------------------- how much is held, in any source

GROWTH = """
import pickle, sys
from dslc.runtime.data.sources.open_sources import open_source
from dslc.runtime.data.sampler import permutation
step = pickle.load(sys.stdin.buffer)
def held():
    return next(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("Anonymous:"))
order = permutation(step, 0)
before = held()
train = open_source(step).train
for at in range(0, len(order), 64):
    train.batch(order[at : at + 64])
    if at == 1024 and step.source == "parquet":  # pyarrow has begun: some 30 MB, whatever it reads
        before = held()
print(held() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is read from /proc")
@pytest.mark.parametrize("kind", ["tokens", "mnist", "parquet"])
def test_a_source_much_larger_than_a_batch_is_not_held(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that takes an epoch's batches of 32 MB grows by less than a quarter of that."""
    size = 32 << 20
    if kind == "tokens":
        made_data.llm_c(tmp_path / "a.bin", np.zeros(size // 2, "<u2"))
        step = step_for(c.Tokens(files=str(tmp_path / "a.bin")), context=1024)
    elif kind == "mnist":
        made_data.mnist(tmp_path / "m", train=size // 784)
        step = step_for(c.MNIST(dir=str(tmp_path / "m")))
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        monkeypatch.setattr(tables, "BLOCK", 1 << 20)
        monkeypatch.setattr(tables, "WINDOW", 2 << 20)
        numbers = pa.array(made_data.random().normal(size=size // 4).astype(np.float32))
        table = pa.table({"x": pa.FixedSizeListArray.from_arrays(numbers, 64), "y": np.zeros(size // 256, np.int64)})
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=2048)
        step = parquet_step(tmp_path)
        assert len(step.arguments["blocks"]) > 30
    run = subprocess.run([sys.executable, "-c", GROWTH], input=pickle.dumps(step), capture_output=True, check=True)
    assert int(run.stdout) * 1024 < size / 4
