"""The all-gather of sharded tensors under a name short enough for gloo's threads to write down side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers.gang import gang
from helpers.launcher import Launcher
from helpers.made_programs import images, places, program, python
from torch.autograd.profiler import profile

from dslc.compiler.ir import program as p

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64)


def _gathered(rank: int) -> set[str]:
    """Returns the operations that the process group is asked for while sharded tensors are gathered. Raises
    AssertionError if a gathered tensor is wrong.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    asked = set()
    for dtype in DTYPES:
        for rows in (4, 3, 1):  # equal parts, a shorter one, an empty one
            whole = torch.arange(rows * 3).reshape(rows, 3).remainder(2).to(dtype)
            shared: Any = distribute_tensor(whole, mesh, [Shard(0)])
            with profile() as seen:
                back = shared.full_tensor()
            assert torch.equal(back, whole), (dtype, rows)
            asked |= {event.name for event in seen.function_events if event.name.startswith("c10d::")}
    return asked


def test_whole_tensors_are_gathered_under_a_short_name() -> None:
    assert gang(2, _gathered, backend="gloo") == [{"c10d::_allgather_base_"}] * 2


def test_each_rank_has_it(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(
        "import torch\n"
        "def net():\n"
        "    name = '_c10d_functional::all_gather_into_tensor'\n"
        "    print('for the CPU:', torch._C._dispatch_has_kernel_for_dispatch_key(name, 'CPU'))\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
    )
    job = program(2, images(tmp_path), model=p.ModelStep(python=python("kernels:net", tmp_path)), sync_batch_norm=False)
    outcome, _ = launcher.launch(job, places(2), tmp_path / "run")
    assert outcome.is_complete
    assert [(tmp_path / f"run/logs/rank-{rank}.log").read_text() for rank in (0, 1)] == ["for the CPU: True\n"] * 2
