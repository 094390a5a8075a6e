"""Plans made by hand, for the code that reads plans: text and pictures. No job, no rules: numbers are round, not
measured.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace
from math import prod

from dslc.compiler.cost.schedule_cost import timeline
from dslc.compiler.ir.actions import Payload, TrafficNode
from dslc.compiler.ir.memory import MemoryNode
from dslc.compiler.ir.plan import AxisNode, PlanView, RankNode, StageNode, TopologyNode
from dslc.compiler.ir.records import DataNode, Estimate, Layer, Schedule, ShareNode, StageTime, StepEnd, TrainingNode
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.placement.schedules import ScheduleTable, table

GIB, MIB, KIB = 2**30, 2**20, 2**10
STEP = Estimate(
    step_time=1.25,
    mfu=0.412,
    source="bound",
    arithmetic=1.0,
    transfers=0.1,
    waiting=0.1,
    exposed=0.05,
    update=0.0,
    samples=0.0,
    rest=0.0,
    launches=0.0,
    efficiency=1,
    within=0,
    between=0,
    bubble=0.0,
    stages=(),
    message=0.001,
    ends=(),
)


def _step(stages: tuple[StageNode, ...], schedule: Schedule | None, pipeline: int) -> Estimate:
    """The step of a plan whose stages take equally long."""
    return replace(
        STEP,
        bubble=schedule.bubble if schedule else 0.0,
        stages=tuple(StageTime(forward=0.01, backward=0.02) for _ in stages),
        ends=tuple(StepEnd(exposed=0.05, update=0.0) for _ in range(pipeline)),
    )


def fact(*shape: int) -> TensorFact:
    return TensorFact(shape=shape, dtype="float32")


def layer(name: str, kind: str, before: TensorFact, after: TensorFact, parameters: int, flops: int) -> Layer:
    kept = 4 * before.shape[0] * 100
    return Layer(
        name=name,
        kind=kind,
        input=before,
        output=after,
        parameters=parameters,
        flops=flops,
        kept=kept,
        line="job.plt:3:5",
    )


def image_layers() -> tuple[Layer, ...]:
    big, small, flat = fact(16, 8, 8), fact(32, 4, 4), fact(512)
    return (
        layer("0", "conv2d", fact(1, 8, 8), big, 416, 150_000),
        layer("1", "relu", big, big, 0, 0),
        layer("2", "conv2d", big, small, 12_832, 1_200_000),
        layer("3", "flatten", small, flat, 0, 0),
        layer("4", "linear", flat, fact(10), 5_130, 30_720),
    )


def gpt_layers(blocks: int, width: int, context: int) -> tuple[Layer, ...]:
    tokens, wide = TensorFact(shape=(context,), dtype="int64"), fact(context, width)
    block = 12 * width * width
    return (
        layer("embedding", "embedding", tokens, wide, 128_000 * width, 0),
        *(layer(f"blocks.{n}", "transformer_block", wide, wide, block, 6 * block * context) for n in range(blocks)),
        layer("head", "linear", wide, fact(context, 128_000), 0, 6 * 128_000 * width * context),
    )


def shares(samples: int, ranks: int) -> tuple[ShareNode, ...]:
    size, rest = divmod(samples, ranks)
    runs = ((0, rest, size + 1), (rest, ranks - rest, size))
    return tuple(ShareNode(first_rank=a, ranks=n, samples=s) for a, n, s in runs if n and s)


def make_plan(
    job: str,
    layers: tuple[Layer, ...],
    *,
    nodes: int = 1,
    processes: int = 2,
    kind: str = "cpu",
    pipeline: int = 1,
    context: int = 1,
    tensor: int = 1,
    schedule: str = "1f1b",
    virtual: int = 1,
    microbatches: int = 1,
    batch: int = 64,
    last: int = 0,
    scale: int = MIB,
) -> PlanView:
    """A plan over `nodes` x `processes` devices; bytes are small counts of `scale`."""
    world = nodes * processes
    sizes = {"pipeline": pipeline, "data": world // (pipeline * context * tensor), "context": context, "tensor": tensor}
    strides = {"pipeline": world // pipeline, "data": context * tensor, "context": tensor, "tensor": 1}
    rows = table(schedule, pipeline, microbatches, virtual) if pipeline > 1 else None
    share = batch // sizes["data"]
    stages = _stages(layers, rows, share // microbatches, tensor * context)
    actions = _schedule(rows, stages)
    return PlanView(
        job=job,
        hash=hashlib.sha256(job.encode()).hexdigest()[:16],
        topology=TopologyNode(
            nodes=nodes,
            node_counts=(nodes,),
            processes=processes,
            device="cpu" if kind == "cpu" else "cuda",
            kind=kind,
            memory=None if kind == "cpu" else 80 * GIB,
            limit=None,
            backend="gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl",
        ),
        axes=tuple(
            AxisNode(
                name=axis,
                size=sizes[axis],
                stride=strides[axis],
                between_nodes=sizes[axis] > 1 and sizes[axis] * strides[axis] > processes,
            )
            for axis in sizes
        ),
        shards=1,
        sequence=tensor > 1,
        parameters=sum(one.parameters for one in layers),
        layers=layers,
        stages=stages,
        data=DataNode(
            source="digits",
            train=1438,
            visited=1438,
            order="shuffled each epoch",
            validation=359,
            split="random",
            shuffle=True,
            batch=batch,
            shares=shares(batch, sizes["data"]),
            last=last,
            last_shares=shares(last, sizes["data"]),
            microbatch=share // microbatches,
            microbatches=microbatches,
            steps_per_epoch=1438 // batch + (1 if last else 0),
            steps=5 * (1438 // batch + (1 if last else 0)),
        ),
        schedule=actions,
        training=TrainingNode(
            optimizer="sgd",
            lr=0.1,
            lr_written=0.05,
            lr_schedule="constant",
            precision="fp32",
            clip=None,
            seed=0,
        ),
        ranks=tuple(_ranks(pipeline, world // pipeline, stages, sizes, scale)),
        step=None if kind == "cpu" else _step(stages, actions, pipeline),
    )


def _stages(layers: tuple[Layer, ...], rows: ScheduleTable | None, samples: int, parts: int) -> tuple[StageNode, ...]:
    """`samples` are those of a micro-batch, of which a rank keeps one of `parts`."""
    count = rows.stages if rows else 1
    bounds = [len(layers) * n // count for n in range(count + 1)]
    return tuple(
        StageNode(
            index=n,
            pipeline=rows.placement[n] if rows else 0,
            first=a,
            last=b - 1,
            parameters=sum(one.parameters for one in layers[a:b]),
            flops=sum(one.flops for one in layers[a:b]),
            kept=int(samples / parts * sum(one.kept for one in layers[a:b])),
            output_bytes=samples * 4 * prod(layers[b - 1].output.shape),
        )
        for n, (a, b) in enumerate(itertools.pairwise(bounds))
    )


def _schedule(rows: ScheduleTable | None, stages: tuple[StageNode, ...]) -> Schedule | None:
    if rows is None:
        return None
    time = timeline(rows, [1.0] * len(stages), [2.0] * len(stages))
    return Schedule(
        name=rows.name,
        virtual_stages=rows.virtual_stages,
        bubble=time.bubble,
        rows=tuple(" ".join(str(action) if action else "-" for action in row) for row in rows.rows),
    )


def _ranks(
    pipeline: int, each: int, stages: tuple[StageNode, ...], sizes: dict[str, int], scale: int
) -> list[RankNode]:
    found = []
    for p in range(pipeline):
        mine = tuple(stage.index for stage in stages if stage.pipeline == p)
        traffic = []
        if sizes["data"] > 1:
            traffic.append(_traffic("all_reduce", "data", "gradients", 2, 3 * scale))
        if pipeline > 1:
            traffic.append(_traffic("send", "pipeline", "activations", 8, 2 * scale))
        if sizes["tensor"] > 1:
            traffic.append(_traffic("all_gather", "tensor", "activations", 64, scale))
            traffic.append(_traffic("reduce_scatter", "tensor", "activations", 64, 4 * scale))
        if sizes["context"] > 1:
            traffic.append(_traffic("all_gather", "context", "keys and values", 32, scale))
        memory = MemoryNode(
            parameters=6 * scale,
            gradients=6 * scale,
            optimizer=12 * scale,
            activations=(pipeline - p) * 4 * scale,
            buffers=0,
            communication=scale,
        )
        found.append(
            RankNode(
                pipeline=p,
                first=p * each,
                last=(p + 1) * each - 1,
                stages=mine,
                memory=memory,
                traffic=tuple(traffic),
                flops=10**9,
            )
        )
    return found


def _traffic(operation: str, axis: str, what: str, count: int, size: int) -> TrafficNode:
    return TrafficNode(
        operation=operation,
        axis=axis,
        what=Payload(what),
        dtype="float32",
        count=count,
        bytes=size,
        ranks=0,  # no drawing looks at these two
        stride=0,
    )


def digits() -> PlanView:
    """Two processes on a CPU, an uneven last batch."""
    return make_plan("digits", image_layers(), batch=64, last=31, scale=64 * KIB)


def four_stages() -> PlanView:
    """Four ranks, a stage on each, the uneven end left out."""
    layers = gpt_layers(6, 128, 64)
    return make_plan("pipeline", layers, processes=4, pipeline=4, microbatches=8)


def sixteen() -> PlanView:
    """Two nodes of eight GPUs, three axes, two stages on each rank."""
    layers = gpt_layers(32, 4096, 4096)
    return make_plan(
        "cluster",
        layers,
        nodes=2,
        processes=8,
        kind="h100",
        pipeline=2,
        tensor=2,
        schedule="interleaved_1f1b",
        virtual=2,
        microbatches=64,
        batch=512,
        scale=GIB,
    )


def thousand() -> PlanView:
    """1,024 GPUs on 128 nodes, no more than eight pipeline coordinates."""
    layers = gpt_layers(48, 8192, 4096)
    return make_plan(
        "thousand",
        layers,
        nodes=128,
        processes=8,
        kind="h100",
        pipeline=8,
        tensor=8,
        microbatches=16,
        batch=1024,
        scale=GIB,
    )


def many_thousand() -> PlanView:
    """16,384 GPUs, all four axes."""
    layers = gpt_layers(126, 16384, 8192)
    return make_plan(
        "vast",
        layers,
        nodes=2048,
        processes=8,
        kind="h100",
        pipeline=16,
        context=2,
        tensor=8,
        microbatches=32,
        batch=2048,
        scale=GIB,
    )
