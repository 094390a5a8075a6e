"""The operations of `fully_shard`, where a plan has shards and replicas of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.module_facts import FACTS, analysed

from dslc.compiler.graph.build import build_graph
from dslc.compiler.graph.plan_graph import PlanGraph
from dslc.compiler.graph.verify import Unsound, verify
from dslc.compiler.ir.actions import Collective, Payload
from dslc.dsl.language.blocks import DevicesSpec, ParallelismSpec


def planned(replicas: int) -> PlanGraph:
    """Returns the plan of a network whose forward passes change a buffer, on four ranks."""
    facts = replace(FACTS, batch_norm=False, unused=(), changed=("blocks.0.mask",))
    parallelism = ParallelismSpec(zero=3, replicas=replicas)
    analysis, report = analysed(facts, devices=DevicesSpec(cpus=4), parallelism=parallelism)
    assert analysis is not None and not report.errors, report.errors
    return build_graph(analysis)


@pytest.mark.parametrize("replicas", [1, 2])
def test_buffers_are_broadcast_to_all_replicas(replicas: int) -> None:
    plan = planned(replicas)
    name, buffers = next(each for each in plan.of_kind(Collective) if each[1].carries is Payload.BUFFERS)
    assert buffers.group == (4, 1)
    plan.change(name, ranks=2)
    with pytest.raises(Unsound) as unsound:
        verify(plan)
    assert unsound.value.proposition == "groups"


def test_gathers_and_scatters_are_within_a_replica() -> None:
    groups = {(each.operation, each.carries): each.group for _, each in planned(2).of_kind(Collective)}
    assert groups["all_gather", Payload.PARAMETERS] == groups["reduce_scatter", Payload.GRADIENTS] == (2, 1)
    assert groups["all_reduce", Payload.GRADIENTS] == (2, 2)
