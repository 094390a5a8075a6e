"""Blocks that are alike are traced once: the facts are those of tracing each; and where blocks differ in anything, each
is traced.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.made_jobs import make_job
from helpers.own_networks import RepeatedBlocks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dslc.compiler.ir.facts import Facts, SourceFacts
from dslc.compiler.ir.module_facts import ModelFacts
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.trace.batch import Outputs
from dslc.compiler.trace.cut import ModuleCut
from dslc.compiler.trace.fake_tensor_mode import FakeTensorMode
from dslc.compiler.trace.reuse.block_reuse import BlockReuse
from dslc.compiler.trace.reuse.repeated_blocks import find_repeated_blocks
from dslc.compiler.trace.run import TracedModule
from dslc.compiler.trace.trace_model import trace_model
from dslc.dsl.language.blocks import ParallelismSpec
from dslc.dsl.language.job import JobSpec
from dslc.probe.trace_network import with_seams
from dslc.probe.trial import Files, Trial

TOKENS = TensorFact(shape=(5,), dtype="int64")
STEPS: list[Tensor] = []  # what blocks leave behind
COUNTS = [0]


class Block(nn.Module):
    """`kind` and `spoilt` choose what it does; `number` differs from block to block and is read by some."""

    def __init__(self, width: int, number: int, kind: str, spoilt: str, dropout: float) -> None:
        super().__init__()
        self.number, self.kind, self.spoilt = number, kind, spoilt
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.spare = nn.Parameter(torch.zeros(3)) if kind == "spare" else None
        self.scale = nn.Parameter(torch.ones(())) if kind == "scaled" else None
        if kind == "table":
            self.register_buffer("table", torch.ones(width), persistent=False)

    def forward(self, x: Tensor, by: Tensor, factor: float = 1.0) -> Any:
        y = self.up(self.norm(x) * by)
        y = y.tanh() if self.kind == "tanh" else y.relu() if self.kind != "softmax" else y.softmax(-1)
        if self.spoilt == "reads":
            y = y * (1 + 0 * self.number)
        if self.spoilt == "samples" and x.shape[0] > 3 and self.number == 4:
            y = y.exp()
        if self.spoilt == "backward" and self.number == 5:
            y = y.exp()
        y = self.dropout(self.down(y)) * factor
        if self.scale is not None:
            y = y * self.scale
        if self.kind == "table":
            y = y * self.table
        if self.spoilt == "keeps":
            self.kept = y
        if self.spoilt == "leaves":
            STEPS.append(y)
        if self.spoilt == "counts":
            COUNTS[0] += 1
            y = y.sin() if COUNTS[0] % 5 == 0 else y
        if self.spoilt == "writes":
            by.add_(1)
        return (x + y, None) if self.kind == "pair" else x + y


class Net(nn.Module):
    """Blocks whose kinds repeat; `spoilt` is the way in which some differ, or are used."""

    def __init__(
        self,
        kinds: tuple[str, ...] = ("relu",),
        blocks: int = 9,
        spoilt: str = "",
        width: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.spoilt, self.kinds = spoilt, kinds
        self.table = nn.Embedding(11, width)
        self.by = nn.Parameter(torch.ones(width))
        self.blocks = nn.ModuleList(Block(width, n, kinds[n % len(kinds)], spoilt, dropout) for n in range(blocks))
        four: Any = self.blocks[4] if blocks > 5 else None
        five: Any = self.blocks[5] if blocks > 5 else None
        if spoilt == "tied":
            four.up.weight = five.up.weight
        if spoilt == "frozen":
            four.up.weight.requires_grad_(False)
        if spoilt == "hooked":
            four.register_forward_hook(lambda module, args, output: output.exp())
        if spoilt == "nested":
            four.up = nn.Sequential(four.up, nn.Tanh())
        self.head = nn.Linear(width, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x, by = self.table(tokens), self.by * 2
        if self.spoilt == "writes":
            by = by.detach()
        STEPS.clear()
        COUNTS[0] = 0
        earlier = x
        for n, block in enumerate(self.blocks):
            given = {"factor": 0.5 if self.spoilt == "argument" and n == 4 else 2.0}
            made = block(x, by * 1 if self.spoilt == "objects" else by, **given)
            x = made[0] if isinstance(made, tuple) else made
            if self.spoilt == "skips" and n == 2:
                earlier = x
            if self.spoilt == "between" and n % 2:
                x = x * 2
        if self.spoilt == "again":
            x = self.blocks[4](x, by)
        if self.spoilt == "outside":
            four: Any = self.blocks[4]
            x = x + four.norm.weight
        if self.spoilt == "leaves":
            x = x + STEPS[4]
        return self.head(x + earlier if self.spoilt == "skips" else x)


def both(make: Callable[[], nn.Module], fact: TensorFact = TOKENS, **given: Any) -> int:
    """Compares the facts, and returns the number of blocks that were left out."""
    skipped = BlockReuse()
    assert trace_model(make, fact, reuse=skipped, **given) == trace_model(make, fact, **given)
    return len(skipped.middle.stands) if skipped.middle else 0


def proposed(make: Callable[[], nn.Module]) -> int:
    """Returns the number of blocks that one recorded run finds alike."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        model = make()
    middle, _ = find_repeated_blocks(TracedModule(model, ModuleCut(model), fake, TOKENS))
    return len(middle.stands) if middle else 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "blocks", "left_out"),
    [(("spare",), 9, 4), (("relu", "tanh"), 12, 2)],
)
def test_blocks_that_are_alike_are_traced_once(kinds: tuple[str, ...], blocks: int, left_out: int) -> None:
    assert both(partial(Net, kinds, blocks)) == left_out


@pytest.mark.parametrize(
    "spoilt",
    [
        "reads", "backward", "keeps", "leaves", "counts", "writes", "tied", "frozen", "hooked", "nested",
        "argument", "objects", "skips", "between", "again", "outside",
    ],
)  # fmt: skip
def test_blocks_that_differ_are_each_traced(spoilt: str) -> None:
    assert proposed(Net) == 4
    assert proposed(partial(Net, spoilt=spoilt)) == 0


@pytest.mark.slow
def test_blocks_that_differ_in_a_larger_batch_alone_are_each_traced() -> None:
    make = partial(Net, spoilt="samples")
    assert proposed(make) == 4
    assert both(make) == 0


class Odd:
    """An object that cannot be shown."""

    def __repr__(self) -> str:
        raise ValueError("odd")


@pytest.mark.slow
@pytest.mark.parametrize(("held", "left_out"), [([Odd()], 4), ({Odd()}, 0)])
def test_attributes_that_cannot_be_compared_are_no_error(held: object, left_out: int) -> None:
    def make() -> nn.Module:
        made = Net()
        for block in made.blocks:
            vars(block)["odd"] = copy(held)
        return made

    assert both(make) == left_out


@pytest.mark.slow
def test_a_plan_over_a_tensor_axis_is_that_of_all_blocks() -> None:
    plan = ("blocks.*.up: column", "blocks.*.down: row")
    assert both(Net, tensor=2, tensor_plan=plan) == 4
    assert both(Net, tensor=2, tensor_plan=("blocks.6.up: column", "blocks.6.down: row")) == 0
    assert both(Net, tensor=2, tensor_plan=("blocks.*.up: column",)) == 0  # it is refused, and named at the first


def test_what_is_inside_a_block_that_is_left_out() -> None:
    skipped = BlockReuse()
    trace_model(Net, TOKENS, reuse=skipped)
    assert skipped.middle is not None
    path, stand = next(iter(skipped.middle.stands.items()))
    assert skipped.has_inside(path) and skipped.has_inside(f"{path}.up")
    assert not skipped.has_inside(f"{stand}.up") and not skipped.has_inside(f"{path}0.up")
    assert not BlockReuse().has_inside(f"{path}.up")


def cut_both(make: Callable[[], nn.Module], job: JobSpec, fact: TensorFact = TOKENS, **given: Any) -> ModelFacts:
    """Compares the facts of a module that is cut, with blocks that are left out and without, and returns them."""
    facts: list[ModelFacts] = []
    made: list[nn.Module] = []
    for skipped in (BlockReuse(), BlockReuse(wanted=False)):

        def keep() -> nn.Module:
            made.append(make())
            return made[-1]

        found = trace_model(keep, fact, reuse=skipped, **given)
        trial = Trial(job=job, facts=Facts(source=SourceFacts(input=fact)), files=Files(""))
        facts.append(with_seams(trial, made[-1], found, fact, skipped))
        assert (skipped.middle is not None) == skipped.wanted
    assert facts[0] == facts[1]
    return facts[0]


def test_a_pipeline_is_cut_over_a_tensor_axis_as_with_all_blocks() -> None:
    plan = ("blocks.*.up: column", "blocks.*.down: row")
    facts = cut_both(Net, make_job(), tensor=2, tensor_plan=plan)
    assert not facts.uncut and any(not seam.refused for seam in facts.seams)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fact"), [(RepeatedBlocks, TensorFact(shape=(1, 8, 8), dtype="float32")), (Net, TOKENS)]
)
def test_uses_of_a_parameter_in_blocks_that_are_left_out_are_seen(kind: type[nn.Module], fact: TensorFact) -> None:
    """Each block uses a parameter twice, or all blocks use one."""
    facts = cut_both(kind, make_job(parallelism=ParallelismSpec(pipeline=2, schedule="zbv")), fact)
    used = {place for _, *places, _ in facts.repeated for place in places}
    assert used.issuperset(f"blocks.{n}" for n in range(9))


@pytest.mark.slow
def test_compiled_blocks_keep_what_each_keeps() -> None:
    assert both(Net, compile=True) == 4


@pytest.mark.slow
@settings(max_examples=3, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_blocks_have_the_facts_of_each(data: st.DataObject) -> None:
    kind = st.sampled_from(("relu", "tanh", "softmax", "pair", "spare", "scaled", "table"))
    kinds = tuple(data.draw(st.lists(kind, min_size=1, max_size=2), label="kinds"))
    blocks = data.draw(st.integers(8, 6 * len(kinds) + 4), label="blocks")
    low, dropout = data.draw(st.booleans(), label="low"), data.draw(st.sampled_from((0.0, 0.1)), label="dropout")
    both(partial(Net, kinds, blocks, "", data.draw(st.integers(1, 5), label="width"), dropout), low=low)


def test_no_outputs_are_made_for_trials_that_need_none(tmp_path: Path) -> None:
    """Those of a language model of 128 thousand tokens would take gigabytes."""
    file = str(tmp_path / "outputs.pt")
    trace_model(partial(Net, blocks=2), TOKENS, outputs=Outputs(file, TOKENS))
    assert not os.path.exists(file)


class Called(nn.Module):
    """A network, which is no container."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def in_containers(kind: str) -> nn.Module:
    """Returns a network that keeps four blocks in containers of a kind."""

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    net = Called()
    match kind:
        case "dictionary":
            net.blocks = nn.ModuleDict({name: block() for name in "abcd"})
        case "nested":
            net.blocks = nn.ModuleList([nn.ModuleDict({"even": block(), "odd": block()}) for _ in range(2)])
        case "one in each":
            net.blocks = nn.ModuleList([nn.ModuleDict({"only": block()}) for _ in range(4)])
        case "attributes":
            for number in range(4):
                net.add_module(f"block{number}", block())
        case "dictionary of lists":
            net.blocks = nn.ModuleDict({name: nn.ModuleList([block(), block()]) for name in "ab"})
    return net


@pytest.mark.parametrize(
    ("kind", "blocks"),
    [
        ("dictionary", {"blocks.a", "blocks.b", "blocks.c", "blocks.d"}),
        ("nested", {"blocks.0.even", "blocks.0.odd", "blocks.1.even", "blocks.1.odd"}),
        ("one in each", {"blocks.0.only", "blocks.1.only", "blocks.2.only", "blocks.3.only"}),
        ("attributes", {"block0", "block1", "block2", "block3"}),
        ("dictionary of lists", {"blocks.a.0", "blocks.a.1", "blocks.b.0", "blocks.b.1"}),
    ],
)
def test_blocks_are_found_in_containers_that_are_never_called(kind: str, blocks: set[str]) -> None:
    cut = ModuleCut(in_containers(kind))
    assert cut.blocks == set(cut.layers) == blocks
