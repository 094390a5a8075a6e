"""What the compiler tells the runtime."""

from __future__ import annotations

import pytest
from helpers.paths import ROOT
from helpers.planning import compiled

GPT2 = ROOT / "benchmarks" / "jobs" / "gpt2.plt"
BLOCKS = tuple(f"blocks.{n}" for n in range(12))


@pytest.mark.parametrize(
    ("settings", "modules"),
    [
        ((), ("",)),
        (("train.compile=false",), ()),
        (("devices.gpus=2",), BLOCKS),  # gradients of a block are exchanged as soon as it is done
        (("memory.recompute=full",), BLOCKS),
        (("parallelism.zero=3", "memory.offload=[optimizer, parameters]"), BLOCKS),
        (("devices.gpus=none", "devices.cpus=1"), BLOCKS),
    ],
)
def test_what_torch_compiles_one_by_one(settings: tuple[str, ...], modules: tuple[str, ...]) -> None:
    assert compiled(GPT2, *settings).program().compiled == modules
