"""The files that jobs drawn at random name (jobs_drawn.py)."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from helpers.paths import HELPERS

from instruments import odd_parts_drawn, own_parts_drawn


def lay_out(folder: Path) -> None:
    """Writes the files that the jobs name."""
    for name in ("own_networks.py", "own_transformer.py", "own_loss_draws.py"):
        shutil.copy(HELPERS / name, folder)
    own_parts_drawn.lay_out(folder)
    odd_parts_drawn.lay_out(folder)
    (folder / "corpus.txt").write_text("".join(f"{n} bottles on the wall, " for n in range(99)))
    numbers = np.random.default_rng(0)
    numbers.integers(0, 50, 3000).astype("<u2").tofile(folder / "corpus.bin")
    images, vectors = numbers.random((37, 2, 6, 5), np.float32), numbers.random((53, 7), np.float32)
    np.savez(folder / "images.npz", x=images, y=(images[:, 0, 0, 0] * 3).astype(np.int64))
    np.savez(folder / "vectors.npz", x=vectors, y=vectors[:, :2] - vectors[:, 2:4])
    _write_pictures(folder / "pictures.parquet")


def _write_pictures(file: Path) -> None:
    """60 gray pictures of 8 x 8 in ten classes."""
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    made = []
    for pixels in np.random.default_rng(1).integers(0, 256, (60, 8, 8), dtype=np.uint8):
        held = io.BytesIO()
        Image.fromarray(pixels).save(held, "png")
        made.append(held.getvalue())
    pq.write_table(pa.table({"x": made, "y": np.arange(60) % 10}), file)
