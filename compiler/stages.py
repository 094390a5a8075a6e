"""Where the model is cut: layers onto the stages of a pipeline.

`balanced` finds the cut whose slowest stage is as fast as can be, by dynamic programming over all cuts (exact; time by
FLOPs, forward and backward). Stages are runs of consecutive layers, none empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from dslc.compiler.facts import TensorFact
from dslc.compiler.layout import Layout
from dslc.compiler.model import LayerNode, ModelGraph
from dslc.dsl.calls import Fp32
from dslc.dsl.diagnostics import Report
from dslc.dsl.job import JobSpec


def cut(job: JobSpec, layout: Layout, model: ModelGraph, report: Report) -> tuple[range, ...] | None:
    """The layers of each stage, in order; None with the reason in the report."""
    stages = layout.sizes["pipeline"] * layout.virtual_stages
    layers = len(model.layers)
    wanted = job.parallelism.stages
    if stages > layers:
        report.add(
            "E0410",
            f"{layers} layers cannot fill {stages} stages",
            job.parallelism.at("pipeline"),
            label=f"{layout.sizes['pipeline']} ranks x {layout.virtual_stages} stages"
            if layout.virtual_stages > 1
            else "",
            help="fewer stages, or a deeper network",
        )
        return None
    if not isinstance(wanted, tuple):
        return balance([layer.forward_flops + layer.backward_flops for layer in model.layers], stages)
    if len(wanted) != stages or sum(wanted) != layers:
        report.add(
            "E0411",
            f"`parallelism.stages` names {len(wanted)} stages with {sum(wanted)} layers in all, "
            f"but there are {stages} stages and {layers} layers",
            job.parallelism.at("stages"),
            help="one count for each stage, or `balanced`",
        )
        return None
    starts = [sum(wanted[:i]) for i in range(stages)]
    return tuple(range(start, start + count) for start, count in zip(starts, wanted, strict=True))


def sent(job: JobSpec, layer: LayerNode) -> TensorFact:
    """What a stage that ends with `layer` sends for one sample: of the dtype in which it is made."""
    precision, made = job.train.precision, layer.output
    low = layer.low or getattr(precision, "level", "O1") == "O2"
    if made.dtype != "float32" or isinstance(precision, Fp32) or not low:
        return made
    return replace(made, dtype="bfloat16" if precision.word == "bf16" else "float16")


def balance(costs: Sequence[float], stages: int) -> tuple[range, ...]:
    """Cuts `costs` into `stages` runs, none empty, so that the largest sum is least; ties go to the earlier cut."""
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    best = [list(total)]  # best[k][i]: the least largest sum of the first i layers in k + 1 stages
    cuts: list[list[int]] = [[0] * len(total)]
    for k in range(1, stages):
        row, where = [float("inf")] * len(total), [0] * len(total)
        for i in range(k + 1, len(total)):
            for j in range(i - 1, k - 1, -1):
                last = total[i] - total[j]
                if last >= row[i]:
                    break  # a longer last stage is only slower
                slowest = max(best[k - 1][j], last)
                if slowest <= row[i]:
                    row[i], where[i] = slowest, j
        best.append(row)
        cuts.append(where)
    ends = [len(costs)]
    for k in range(stages - 1, 0, -1):
        ends.append(cuts[k][ends[-1]])
    bounds = [0, *reversed(ends)] if stages > 1 else [0, len(costs)]
    return tuple(range(a, b) for a, b in itertools.pairwise(bounds))
