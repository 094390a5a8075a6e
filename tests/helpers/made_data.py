"""Small data files in common formats, made from a fixed seed."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def random() -> np.random.Generator:
    return np.random.default_rng(7)


def llm_c(file: Path, tokens: Array, vocab: int = 0, version: int | None = None) -> Path:
    """A file of tokens with the header of llm.c."""
    magic, known = {2: (20240520, 1), 4: (20240801, 7)}[tokens.itemsize]
    head = np.zeros(256, "<i4")
    head[:4] = (magic, known if version is None else version, len(tokens), vocab)
    file.write_bytes(head.tobytes() + tokens.tobytes())
    return file


def learnable(rows: int, numbers: int, classes: int) -> tuple[Array, Array]:
    """Bytes (rows, numbers), and a class that follows from them."""
    pixels = random().integers(0, 256, (rows, numbers), dtype=np.uint8)
    return pixels, (pixels[:, 0].astype(int) * classes // 256).astype(np.uint8)


def mnist(folder: Path, train: int = 48, test: int = 10, *, packed: bool = False) -> Path:
    folder.mkdir(parents=True)
    for split, count in (("train", train), ("t10k", test)):
        pixels, labels = learnable(count, 28 * 28, 10)
        for name, head, body in (
            ("images-idx3-ubyte", struct.pack(">4B3I", 0, 0, 8, 3, count, 28, 28), pixels.tobytes()),
            ("labels-idx1-ubyte", struct.pack(">4BI", 0, 0, 8, 1, count), labels.tobytes()),
        ):
            whole = gzip.compress(head + body) if packed else head + body
            (folder / f"{split}-{name}{'.gz' if packed else ''}").write_bytes(whole)
    return folder


def cifar10(folder: Path, rows: int = 12, *, binary: bool = False) -> Path:
    folder.mkdir(parents=True)
    for n, name in enumerate((*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")):
        pixels, labels = learnable(rows + n, 3072, 10)
        if binary:
            (folder / f"{name}.bin").write_bytes(np.concatenate([labels[:, None], pixels], 1).tobytes())
        else:
            (folder / name).write_bytes(python2_batch(pixels, labels))
    return folder


def python2_batch(pixels: Array, labels: Array) -> bytes:
    """Returns a batch as Python 2 wrote it: protocol 2, strings of bytes, the pixels as they are."""
    text = lambda word: b"U" + bytes([len(word)]) + word  # noqa: E731
    data = pixels.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R("
        b"K\x01" + b"M" + struct.pack("<H", len(pixels)) + b"M\x00\x0c\x86"
        b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNN"
        b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<I", len(data)) + data + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels.tolist()) + b"e"
    made = b"\x80\x02}(" + text(b"labels") + numbers + text(b"data") + array + b"u."
    assert (pickle.loads(made, encoding="bytes")[b"data"] == pixels).all()
    return made


def pictures(folder: Path, each: int = 12, classes: tuple[str, ...] = ("cat", "dog")) -> Path:
    """Pictures of several sizes, dark or light by their class."""
    from PIL import Image

    numbers = random()
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for n in range(each):
            pixels = numbers.integers(0, 128, (12 + n % 3, 12 + n % 5, 3), dtype=np.uint8) + np.uint8(120 * label)
            Image.fromarray(pixels).save(folder / name / f"{n:03}.{'png' if n % 2 else 'jpg'}")
    return folder


def parquet(folder: Path, files: int = 2, rows: int = 40, group: int = 8, **columns: Any) -> Path:
    """`x`: 6 real numbers; `y`: a class that follows from them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(exist_ok=True)
    numbers = random()
    for n in range(files):
        x = numbers.normal(size=(rows, 6)).astype(np.float32)
        made = {"x": pa.array(x.tolist(), pa.list_(pa.float32())), "y": (x[:, 0] > 0).astype(np.int64)} | columns
        pq.write_table(pa.table(made), folder / f"part-{n}.parquet", row_group_size=group)
    return folder


def dataset(folder: Path, rows: int = 60, *, splits: bool = False) -> Path:
    import datasets

    datasets.disable_progress_bars()
    x = random().normal(size=(rows, 6)).astype(np.float32)
    labels = datasets.ClassLabel(names=["less", "more"])
    features = datasets.Features({"x": datasets.List(datasets.Value("float32")), "y": labels})
    made = datasets.Dataset.from_dict({"x": x.tolist(), "y": (x[:, 0] > 0).astype(int).tolist()}, features)
    if splits:
        made = made.train_test_split(test_size=12, shuffle=False)
    made.save_to_disk(folder)
    return folder


def encoded(rows: int = 40) -> list[dict[str, Any]]:
    """Pictures as `datasets` stores them, light where their number is odd."""
    import io

    from PIL import Image

    made = []
    for n in range(rows):
        held = io.BytesIO()
        pixels = random().integers(0, 100, (6, 7), dtype=np.uint8) + np.uint8(n + 100 * (n % 2))
        Image.fromarray(pixels).save(held, "png")
        made.append({"bytes": held.getvalue(), "path": None})
    return made
