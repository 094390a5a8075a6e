"""Compares the account with published formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from helpers.made_jobs import gpt_model, make_job

from dslc.compiler.cost.account import account
from dslc.compiler.cost.gathered_units import GatheredBytes, GatheredUnits, UnitBytes, gathered_by_action
from dslc.compiler.cost.rank_stages import LayerSizes, RankStages, StageMemory
from dslc.compiler.ir.facts import Facts
from dslc.compiler.placement.schedules import ScheduledAction
from dslc.compiler.rules.analyse import analyse
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.diagnostics import Report
from dslc.dsl.language import calls as c
from dslc.dsl.language import optimizers as o
from dslc.dsl.language.blocks import DataSpec, DevicesSpec, MemorySpec, ParallelismSpec, TrainSpec
from dslc.dsl.language.layers import ViT
from dslc.dsl.language.registry import Call


def analysis_of(
    optimizer: o.Optimizer | None = None,
    cpus: int = 4,
    memory: MemorySpec | None = None,
    freeze: tuple[str, ...] = (),
    network: Call | None = None,
    dropout: float = 0.0,
    **axes: Any,
) -> Analysis:
    job = make_job(
        model=replace(gpt_model(dropout=dropout), freeze=freeze)
        if network is None
        else replace(gpt_model(), network=network),
        data=DataSpec(source=c.Stdlib() if network is None else c.Digits(), batch=16),
        devices=DevicesSpec(cpus=cpus),
        parallelism=ParallelismSpec(**axes),
        memory=memory or MemorySpec(),
        train=TrainSpec(steps=10, optimizer=optimizer or o.AdamW()),
    )
    report = Report()
    found = report.collect(analyse(job, Facts()))
    assert found is not None, report.found
    return found


@pytest.mark.parametrize(
    ("zero", "parameters", "gradients", "optimizer"), [(0, 1, 4, 8), (2, 0.25, 0, 2), (3, 0.25, 0, 2)]
)
def test_zero_divides_the_state_that_stays(zero: int, parameters: float, gradients: int, optimizer: int) -> None:
    """Rajbhandari et al. 2019, figure 1, for float32 and what `fully_shard` does: parameters are in shards between two
    steps also where ZeRO-2 has them whole in between, and gradients last as long as a step does.
    """
    found = analysis_of(zero=zero)
    assert found.model is not None
    count, memory = found.model.parameters, found.costs[0].memory
    assert memory.parameters == 4 * count * parameters
    steps = 4 * sum(len(layer.parameters) for layer in found.model.layers)  # of each, on each rank
    assert memory.optimizer == count * optimizer + steps
    assert memory.rest == count * (4 * parameters + gradients + optimizer) + steps


def test_zero_1_deals_out_whole_parameters() -> None:
    found = analysis_of(zero=1)
    assert found.model is not None
    count, memory = found.model.parameters, found.costs[0].memory
    assert (memory.parameters, memory.gradients) == (4 * count, 4 * count)
    assert 8 * count / 4 < memory.optimizer < 1.1 * 8 * count / 4


def test_zero_2_gathers_all_and_zero_3_a_unit_at_a_time() -> None:
    whole, units = analysis_of(zero=2), analysis_of(zero=3)
    assert whole.model is not None
    assert whole.costs[0].memory.communication >= 4 * whole.model.parameters * 0.9
    assert units.costs[0].memory.communication < whole.costs[0].memory.communication


def test_the_peak_says_when_it_is_and_which_layers_hold_most() -> None:
    memory = analysis_of().costs[0].memory
    assert memory.peak == sum(memory.kinds.values())
    assert memory.when.startswith("backward pass of")
    assert memory.layers[0].name.startswith("blocks.")
    assert all(share.bytes <= memory.activations for share in memory.layers)


def test_what_is_frozen_has_neither_gradient_nor_state() -> None:
    memory = analysis_of(freeze=("blocks.*", "embedding*", "position*")).costs[0].memory
    trained = 64 * 256 + 128  # the head and the norm before it
    assert memory.optimizer == 8 * trained + 4 * 3
    assert memory.gradients <= 8 * trained


def test_replicas_shard_over_fewer_ranks() -> None:
    found = analysis_of(zero=3, replicas=2)
    assert found.model is not None
    assert found.costs[0].memory.parameters == 4 * found.model.parameters // 2


@pytest.mark.parametrize(
    ("optimizer", "states", "counts"),
    [
        (o.SGD(), 0, 0),
        (o.SGD(momentum=0.9), 1, 0),
        (o.Adam(), 2, 1),
        (o.AdamW(amsgrad=True), 3, 1),
        (o.Adagrad(), 1, 1),
        (o.Rmsprop(momentum=0.9, centered=True), 3, 1),
        (o.NAdam(), 2, 2),
        (o.Lion(), 1, 0),
    ],
)
def test_state_of_an_optimizer(optimizer: o.Optimizer, states: int, counts: int) -> None:
    found = analysis_of(optimizer)
    assert found.model is not None
    tensors = sum(len(layer.parameters) for layer in found.model.layers)
    assert found.costs[0].memory.optimizer == 4 * (states * found.model.parameters + counts * tensors)


def test_recomputing_trades_memory_for_arithmetic() -> None:
    kept, again = analysis_of(), analysis_of(memory=MemorySpec(recompute="full"))
    some = analysis_of(memory=MemorySpec(recompute=c.EveryNthBlock(n=2)))
    picked = analysis_of(memory=MemorySpec(recompute="selective"))
    by_memory = [a.costs[0].memory.activations for a in (again, some, kept)]
    assert by_memory == sorted(set(by_memory))
    assert picked.costs[0].memory.activations < kept.costs[0].memory.activations
    assert kept.model is not None
    blocks = sum(layer.forward_flops for layer in kept.model.layers if layer.recomputable)
    assert again.costs[0].flops - kept.costs[0].flops == blocks * kept.workload.share


def test_micro_batches_divide_activations_and_keep_gradients() -> None:
    one, four = analysis_of(cpus=1).costs[0].memory, analysis_of(cpus=1, microbatches=4).costs[0].memory
    assert four.activations * 4 == pytest.approx(one.activations, rel=0.1)
    assert four.gradients >= four.parameters > one.gradients


def test_gradients_are_the_traffic_of_the_data_axis() -> None:
    found = analysis_of()
    (traffic,) = found.costs[0].traffic
    assert found.model is not None
    assert (traffic.operation, traffic.axis, traffic.bytes) == ("all_reduce", "data", 4 * found.model.parameters)
    assert analysis_of(cpus=1).costs[0].traffic == ()


def gathered(has_backward: tuple[bool, ...], actions: str, staged: bool) -> list[GatheredBytes]:
    """Returns the gathered bytes of actions on units of ten bytes, of which each is a layer, below a root without
    any.
    """
    unit = UnitBytes(gathered=10, buffer=10, copy=10)
    units = GatheredUnits(
        range(1, len(has_backward) + 1),
        has_backward,
        [UnitBytes(0, 0, 0), *[unit] * len(has_backward)],
        0,
        reshard=True,
        staged=staged,
    )
    order = [ScheduledAction(kind, 0, n) for n, kind in enumerate(actions)]  # type: ignore[arg-type]
    return gathered_by_action({0: units}, order)


@pytest.mark.parametrize(
    ("staged", "forward", "backward"), [(False, (20, 20), (10, 20)), (True, (20, 10), (20, 20))], ids=["whole", "stage"]
)
def test_a_stage_frees_no_unit_in_a_backward_pass(
    staged: bool, forward: tuple[int, ...], backward: tuple[int, ...]
) -> None:
    (there, back) = gathered((True, True), "FB", staged)
    assert there.during == forward
    assert back.during == backward, "of the first layer alone, and of the second beside the first, gathered ahead"
    assert back.end == 0


def test_a_unit_without_gradients_stays_gathered_ahead_until_its_next_forward_pass() -> None:
    """The backward pass of the second unit gathers the first ahead, which has none of its own."""
    first, _, third, last = gathered((False, True), "FBFB", True)
    assert first.begin == 20 and first.end == 0
    assert third.begin == 20, "the second unit, and the buffer of the first"
    assert third.during == (30, 10 + 10), "the first in its buffer and copied out, beside the second"
    assert last.end == 0
    unstaged = gathered((False, True), "FBFB", False)
    assert [action.end for action in unstaged] == [0] * 4, "a pass over a whole network ends with nothing gathered"


def test_a_stage_in_its_first_backward_pass_gathers_its_units_beside_a_copy() -> None:
    (_, back) = gathered((True,), "FB", True)
    assert back.begin == 0, "the forward pass has freed it"
    assert back.gathering == (20,) and back.during == (10,)
    assert [unit for unit, _ in back.reduced] == [0, 1]


def test_other_stages_of_a_rank_stay_gathered() -> None:
    unit = UnitBytes(10, 10, 0)
    stages = {stage: GatheredUnits([stage], [True], [unit, unit], stage, reshard=True, staged=True) for stage in (0, 1)}
    actions = [ScheduledAction("F", 0, 0), ScheduledAction("F", 1, 0), ScheduledAction("B", 1, 0)]
    assert [action.during for action in gathered_by_action(stages, actions)] == [(20,), (20,), (20,)]
    assert stages[0].bytes == 10 and stages[1].bytes == 0, "stage 1 is done with its gradients"


def test_beside_gradients_fewer_micro_batches_are_held() -> None:
    """With two micro-batches, the first rank has both in flight before it has a gradient, and one beside the gradients
    of the other.
    """
    memory = analysis_of(pipeline=2, data=2, zero=3, microbatches=2).costs[0].memory
    assert memory.when.endswith("the backward pass of blocks.1") and memory.gradients == 0


@pytest.mark.parametrize(("schedule", "backward"), [("zero_bubble", "W"), ("interleaved_1f1b", "B")])
def test_a_stage_has_gradients_from_its_first_backward_pass_on_and_shards_after_its_last(
    schedule: str, backward: str
) -> None:
    """The last pipeline rank has a block and, in its later stage, the head, whose gradients come before."""
    found = analysis_of(pipeline=2, data=2, zero=2, microbatches=4, schedule=schedule)
    assert found.staging is not None
    rank = RankStages(found.staging, 1, LayerSizes(found.staging))
    block, head = rank.stages
    parameters = [q for n in head.layers for q in rank.layers[n].parameters]
    whole, shards = (4 * rank.numbers(parameters, in_shards=in_shards) for in_shards in (False, True))

    def beside(stage: StageMemory, kind: str) -> set[int]:
        return {action.gradients for key, actions in stage.actions.items() if key[0] == kind for action in actions}

    assert beside(block, "F") == {0, whole}
    assert beside(block, backward) == {whole, shards}
    assert 0 in beside(head, backward) and shards not in beside(head, backward)


def peak_with(found: Analysis, rank: int, layer: int, *, first: int | None = None, **changed: int) -> int:
    """Returns the peak of a rank if a layer works in other bytes of a sample; `first`: in the first half."""
    assert found.staging is not None and found.model is not None
    layers = list(found.model.layers)
    working = layers[layer].float32.working
    assert working is not None and working.halves is not None
    halves = working.halves if first is None else replace(working.halves, first=first)
    working = replace(working, halves=halves, **cast(dict[str, Any], changed))
    layers[layer] = replace(layers[layer], float32=replace(layers[layer].float32, working=working))
    staging = replace(found.staging, model=replace(found.model, layers=tuple(layers)))
    return account(staging, rank, LayerSizes(staging)).peak


@pytest.mark.parametrize("frozen", [(), ("embedding*", "position*", "blocks.0.*")])
def test_the_first_half_of_a_backward_pass_works_beside_all_that_is_kept(frozen: tuple[str, ...]) -> None:
    """The second stage of the first rank, whose backward pass is split, is a block."""
    found = analysis_of(cpus=2, pipeline=2, microbatches=4, schedule="zero_bubble", freeze=frozen)
    assert found.pipeline is not None
    layer = found.pipeline.stages[2].start
    small, large = (peak_with(found, 0, layer, first=size) for size in (10**6, 3 * 10**6))
    assert large - small == 2 * 10**6 * found.workload.microbatch
    assert small > found.costs[0].memory.peak > peak_with(found, 0, layer, first=0)


def test_layers_before_all_that_trains_work_as_under_no_grad() -> None:
    """`blocks.1` frees each tensor that it makes when it has been used, and has no backward pass."""
    found = analysis_of(cpus=1, freeze=("embedding*", "position*", "blocks.[012].*"))
    peak, samples = found.costs[0].memory.peak, found.workload.microbatch
    kept = {"forward": 10**7, "first": 10**7}
    assert peak_with(found, 0, 3, **kept) == peak
    small, large = (peak_with(found, 0, 3, dropping=size) for size in (10**6, 3 * 10**6))
    assert small > peak and large - small == 2 * 10**6 * samples


@pytest.mark.parametrize("dropout", [0.0, 0.1])  # with masks, and states of generators
@pytest.mark.parametrize("schedule", ["none", "1f1b", "zero_bubble", "zbv"])
def test_layers_before_all_that_trains_keep_nothing_to_recompute_from(schedule: str, dropout: float) -> None:
    """Of four blocks `every(4)` recomputes the first, which is frozen."""
    axes: dict[str, Any] = {} if schedule == "none" else {"pipeline": 2, "microbatches": 4, "schedule": schedule}
    first = ("embedding*", "position*", "blocks.0.*")
    plain, again = (
        analysis_of(
            cpus=2 if axes else 1, freeze=first, memory=MemorySpec(recompute=recompute), dropout=dropout, **axes
        )
        for recompute in ("none", c.EveryNthBlock(n=4))
    )
    assert [cost.memory.kinds for cost in plain.costs] == [cost.memory.kinds for cost in again.costs]


def test_a_tensor_axis_divides_the_arithmetic_of_what_is_cut() -> None:
    """Patches are embedded on every rank; blocks and the scores are shared out."""
    found = analysis_of(cpus=2, tensor=2, network=ViT(patch=2, layers=2, width=16, heads=2))
    assert found.model is not None
    patches, *cut = (layer.forward_flops + layer.backward_flops for layer in found.model.layers)
    assert patches > 0
    assert found.costs[0].flops == 16 * (patches + sum(cut) // 2)
    text = analysis_of(cpus=2, tensor=2)
    assert text.model is not None
    assert text.costs[0].flops == 8 * (text.model.forward_flops + text.model.backward_flops)


def test_stages_share_the_parameters() -> None:
    found = analysis_of(pipeline=2, data=2, microbatches=4)
    assert found.model is not None
    assert sum(cost.memory.parameters for cost in found.costs) == 4 * found.model.parameters
    assert found.pipeline is not None
    assert 0 < found.pipeline.bubble < 0.5
