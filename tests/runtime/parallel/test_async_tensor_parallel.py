"""Torch's compiler finds the exchanges of pieces beside products in the blocks that dslc cuts over a tensor axis.

The exchange itself needs GPUs. Here the compiler's pass works on a copy of each graph, and the graph runs as it was.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.gang import gang
from helpers.job_texts import job_text
from helpers.trained import ready

from dslc.compiler.ir.program import JobProgram, RankPlace
from dslc.compiler.trace.private_torch import fake_store
from dslc.runtime.data.batches import batches
from dslc.runtime.data.sources.open_sources import open_source
from dslc.runtime.step.assemble import assemble
from dslc.runtime.step.stepper import stepper

JOB = job_text(
    model={
        "network": "llama(layers = 1, width = 32, heads = 4, kv_heads = 2, hidden = 64, context = 16, vocab = 256)",
        "loss": "cross_entropy()",
    },
    data={"source": "stdlib()", "batch": 4},
    devices={"cpus": 2},
    parallelism={"tensor": 2, "sequence": "true"},
    train={"steps": 1, "optimizer": "sgd(lr = 0.1)", "compile": "true"},
)


@pytest.mark.slow
def test_the_compiler_pairs_every_exchange_of_a_block_with_products(tmp_path: Path) -> None:
    (tmp_path / "job.plt").write_text(JOB)
    made = ready(tmp_path / "job.plt")
    assert made.program.tensor is not None
    program = replace(made.program, tensor=replace(made.program.tensor, asynchronous=True))
    (graphs,) = gang(1, _paired, program, made.places[0])
    gathers, scatters = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
    # Forward: queries, keys and values of one gather, gate and up of another. Backward: their five inputs' gradients.
    assert graphs == [{gathers: 2, scatters: 2}, {gathers: 2, scatters: 5}]


def _paired(rank: int, program: JobProgram, place: RankPlace) -> list[dict[str, int]]:
    """Returns the exchanges of each compiled graph after the compiler's pass, by their names."""
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor.fx_passes import post_grad

    dist.destroy_process_group()
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=2)
    graphs: list[dict[str, int]] = []
    pair = post_grad.micro_pipeline_tp_pass

    def pair_copy(graph: torch.fx.Graph) -> None:
        own = copy.deepcopy(graph)
        with patch.object(dist, "is_nccl_available", return_value=True):
            pair(own)
        names = (str(node.target) for node in own.nodes)
        exchanges = (name.split(".") for name in names if "symm_mem" in name or "_c10d_functional" in name)
        graphs.append(dict(Counter(name for _, name, *_ in exchanges)))

    device = torch.device("cpu")
    samples = open_source(program.data)
    with (
        patch.object(post_grad, "micro_pipeline_tp_pass", pair_copy),
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._inductor.config.patch({"fx_graph_cache": False, "aot_inductor.debug_compile": True}),
    ):
        step = stepper(program, place, assemble(program, device))
        for batch in batches(program.data, samples, place, program.microbatches, 0, 1, device):
            step(batch)
    return graphs
