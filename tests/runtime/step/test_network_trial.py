"""A network is tried on real samples: what it draws, mixes, moves and keeps is known by name and line."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import own_forward_passes as own
from torch import nn

from dslc.compiler.ir.network_facts import UNSEEDED, CodePlace, NetworkFacts
from dslc.compiler.ir.program import LossStep
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.trace.trace_model import trace_model
from dslc.probe.network_trial import modules_in_evaluation, undone
from dslc.runtime.step.network_trial import NetworkTrial

INPUT = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
LINES = Path(own.__file__).read_text().splitlines()


def tried(network: Any, *, traced: bool = False, reads: bool = False) -> NetworkFacts:
    def make() -> nn.Module:
        made: nn.Module = network() if callable(network) and not isinstance(network, nn.Module) else network
        return made

    known = trace_model(make, TensorFact(shape=(6,), dtype="float32")).network if traced else None
    return NetworkTrial(make, (INPUT, torch.zeros(3)), reads=reads).result(known or NetworkFacts())


def code_at(place: CodePlace | None) -> str:
    assert place is not None
    file, number = place.line.split(":")
    assert file == "own_forward_passes.py"
    return LINES[int(number) - 1].strip()


@pytest.mark.parametrize(
    ("how", "source", "code"),
    [
        ("random", "Python's", "return random.randrange(2)"),
        ("numpy", "numpy's", "return int(np.random.randint(2))"),
        ("generator", "`generator`", "return int(self.generator.integers(2))"),
        ("variable", "`GENERATOR`", "return int(GENERATOR.integers(2))"),
        ("secrets", "operating system's", "return secrets.randbelow(2)"),
        ("urandom", "operating system's", "return os.urandom(1)[0] % 2"),
        ("unseeded", "operating system's", "return int(np.random.default_rng().integers(2))"),
        ("system", "operating system's", "return self.system.randrange(2) if self.system is not None else 0"),
        ("object", "`chooser.generator`", "return self.chooser.generator.randrange(2)"),
        ("listed", "`listed.0`", "return int(self.listed[0].randint(2))"),
    ],
)
@pytest.mark.parametrize("traced", [False, True], ids=["tried", "traced"])
def test_a_path_that_host_randomness_chooses_is_known_by_its_line(
    how: str, source: str, code: str, traced: bool
) -> None:
    facts = tried(lambda: own.Path(how), traced=traced)
    assert facts.varies and source in facts.draws_from and code_at(facts.host_draws) == code
    assert facts.draws_globally == (how in ("random", "numpy"))
    assert facts.mixes is None and facts.mixes_evaluation is None
    assert [each.holds for each in facts.attributes] == ["random numbers"] * (
        how in ("generator", "variable", "object", "listed")
    )


@pytest.mark.parametrize("how", ["turns", "later"])
def test_a_path_that_a_count_of_calls_chooses_is_known(how: str) -> None:
    facts = tried(lambda: own.Path(how))
    assert facts.varies and facts.host_draws is None
    assert [(each.name, each.holds) for each in facts.attributes] == [("calls", "a number")]


@pytest.mark.parametrize(
    ("how", "attribute"), [("number", ("listed.1", "a number")), ("cycle", ("turns", "the place of an iterator"))]
)
def test_state_inside_of_an_attribute_is_known(how: str, attribute: tuple[str, str]) -> None:
    facts = tried(lambda: own.Path(how))
    assert facts.varies and [(each.name, each.holds) for each in facts.attributes] == [attribute]


@pytest.mark.parametrize(
    ("how", "name"), [("dotted", "named.blocks.0"), ("table", "table.calls"), ("history", "history.0")]
)
def test_state_inside_of_a_container_is_known(how: str, name: str) -> None:
    facts = tried(lambda: own.CountsInside(how))
    assert facts.varies and (name, "a number") in [(each.name, each.holds) for each in facts.attributes]


@pytest.mark.parametrize("how", ["drawn later", "counted later"])
def test_draws_that_begin_after_some_steps_are_known(how: str) -> None:
    facts = tried(lambda: own.Path(how))
    assert facts.varies and facts.draws_globally
    assert code_at(facts.host_draws).startswith("return random.randrange(2) if")


@pytest.mark.parametrize("how", ["random", "torch", "samples", "clock"])
def test_batch_norms_that_ranks_would_skip_are_known(how: str) -> None:
    facts = tried(lambda: own.SkippedNorms(how), reads=how in ("torch", "samples"))
    assert facts.skipped_norms == tuple(f"blocks.{n}.1" for n in range(3))


@pytest.mark.parametrize(
    ("how", "outside"), [("generator", False), ("variable", False), ("random", True), ("torch", True), ("clock", True)]
)
def test_batch_norms_that_all_ranks_run_alike_are_none_of_them(how: str, outside: bool) -> None:
    assert tried(lambda: own.SkippedNorms(how, outside), reads=how == "torch").skipped_norms == ()


def test_a_path_by_the_clock_is_not_said_to_follow_from_other_samples() -> None:
    facts = tried(lambda: own.SkippedNorms("clock", outside=True))
    assert facts.varies and facts.draws_from == UNSEEDED and "block(x)" in code_at(facts.host_draws)
    assert (facts.mixes, facts.mixes_evaluation, facts.attributes) == (None, None, ())


@pytest.mark.parametrize("direct", [False, True])
def test_a_batch_norm_of_a_users_own_runs_its_own_code(direct: bool) -> None:
    facts = tried(lambda: nn.Sequential(nn.Linear(6, 8), own.ScaledNorm(8, direct=direct), nn.Linear(8, 3)))
    assert (facts.mixes is not None) == direct


@pytest.mark.parametrize("how", ["expanded", "overlapping"])
def test_a_buffer_whose_elements_share_memory_is_tried(how: str) -> None:
    facts = tried(lambda: own.Repeated(how))
    assert facts.tried and (facts.mixes, facts.moved, facts.counted) == (None, (), ())


def test_a_count_that_nothing_depends_on_is_none_of_them() -> None:
    facts = tried(lambda: own.Path("none"), traced=True)
    assert not facts.varies and facts.attributes == ()


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("mean", "x = x - x.mean(0)"),
        ("norm", "x = F.batch_norm(x, None, None, training=True)"),
        ("softmax", "x = x.softmax(0)"),
        ("attention", "x = (x @ x.T).softmax(-1) @ x"),
        ("sort", "x = x.sort(0).values"),
        ("sums", "x = x.cumsum(0)"),
        ("size", "x = x / len(x)"),
        ("gate", "x = x + self.gate * x.mean(0)"),  # which is zero when it is made
        ("dropout", "x = x - x.mean(0)"),
        ("joined", "x = x - x.mean(0)"),
    ],
)
def test_a_network_that_mixes_samples_is_known_by_its_line(how: str, code: str) -> None:
    facts = tried(lambda: own.Mixing(how))
    assert code_at(facts.mixes_evaluation) == code
    assert facts.mixes is not None and (how == "dropout" or code_at(facts.mixes) == code)


@pytest.mark.parametrize("told", [False, True])
def test_a_draw_in_evaluation_is_known_by_its_line(told: bool) -> None:
    facts = tried(lambda: own.Dropping(told))
    assert facts.evaluation_draw is None if told else "else F.dropout(x, 0.1)" in code_at(facts.evaluation_draw)


class Attends(nn.Module):
    """Attention of torch, whose joined projections begin with three parts, before the samples are compared."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.attention, self.leave, self.how = nn.MultiheadAttention(3, 1, batch_first=True), nn.Linear(6, 3), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.unflatten(1, (2, 3))
        scores: torch.Tensor = self.leave(self.attention(tokens, tokens, tokens)[0].flatten(1))
        return scores @ scores.T if self.how == "pairs" else scores.softmax(0)


@pytest.mark.parametrize("how", ["softmax", "pairs"])
def test_joined_projections_are_not_said_to_mix_samples(how: str) -> None:
    place = tried(lambda: Attends(how)).mixes_evaluation
    assert place is not None and place.kind == "Attends"


def test_one_that_mixes_in_training_alone_does_not_in_evaluation() -> None:
    assert "randperm" in code_at(tried(lambda: own.Mixing("shuffle")).mixes)
    facts = tried(lambda: own.Mixing("training"))
    assert "x.mean(0)" in code_at(facts.mixes) and facts.mixes_evaluation is None


@pytest.mark.parametrize(
    "network",
    [
        lambda: own.Mixing("instance"),
        own.Resting,
        own.Untracked,
        own.dropping,
        own.Noisy,
        lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)),
        lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.TransformerEncoderLayer(3, 1, 8, batch_first=True)),
    ],
)
def test_normalisation_and_noise_of_torch_mix_nothing(network: Any) -> None:
    facts = tried(network, traced=True)
    assert (facts.mixes, facts.mixes_evaluation, facts.moved, facts.attributes) == (None, None, (), ())
    assert facts.tried and not facts.varies


@pytest.mark.parametrize(("how", "moved"), [("most", True), ("mean", True), ("samples", True), ("calls", False)])
def test_a_buffer_that_follows_from_the_samples_is_told_from_a_count_of_calls(how: str, moved: bool) -> None:
    facts = tried(lambda: own.Moving(how))
    assert (facts.moved, facts.counted) == ((("moved",), ()) if moved else ((), ("moved",)))


@pytest.mark.parametrize(
    ("how", "written"),
    [
        ("teacher", ("slow.weight", "slow.bias")),
        ("clamped", ("enter.weight",)),
        ("replaced", ("slow.weight",)),
        ("samples", ("slow.bias",)),
        ("none", ()),
    ],
)
def test_a_parameter_that_a_forward_pass_writes_is_known(how: str, written: tuple[str, ...]) -> None:
    facts = tried(lambda: own.Writing(how), traced=True)
    assert (facts.written, facts.moved, facts.counted) == (written, (), ())
    assert facts.written_by_samples == (written if how == "samples" else ())


def test_a_state_that_is_carried_is_told_from_a_tensor_that_is_kept_for_a_look() -> None:
    (attribute,) = tried(own.Carrying).attributes
    assert (attribute.name, attribute.holds) == ("state", "tensors")
    assert code_at(CodePlace(module="", kind="", line=attribute.line)).startswith("self.state, self.seen =")
    assert tried(lambda: own.Carrying("look")).attributes == ()


@pytest.mark.parametrize(
    ("how", "mixes"), [("balance", True), ("slight", True), ("contrast", True), ("mean", False), ("dropout", False)]
)
def test_a_loss_that_a_network_returns_is_tried(how: str, mixes: bool) -> None:
    batch = {"x": INPUT, "y": torch.tensor([0, 1, 2])}
    arguments = {"mean_of": None, "ignore": -100, "shift": 0}
    loss = LossStep(kind="own", arguments=arguments, counts="own", ignore=None, line="")
    facts = NetworkTrial(lambda: own.Losing(how), (batch, batch), loss).result(NetworkFacts())
    assert facts.loss_mixes == mixes


def test_a_draw_of_torch_is_known_by_module_and_line() -> None:
    place = tried(own.Noisy, traced=True).torch_draws
    assert place is not None and place.module == "noise" and "randn_like" in code_at(place)
    place = tried(own.dropping, traced=True).torch_draws
    assert place is not None and (place.module, place.kind) == ("1", "Dropout")


class Table(OrderedDict[str, int]):
    """As the table of activations of `transformers`, which makes a module at each look."""

    def __getitem__(self, key: str) -> int:
        raise AssertionError(f"`{key}` is made")


class WithTable(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 4)
        self.table = Table(relu=1)


def test_a_table_that_makes_its_values_is_read_as_it_is() -> None:
    assert tried(WithTable).attributes == ()


def test_a_trial_leaves_the_generators_of_its_process_alone() -> None:
    import random

    before = random.getstate(), torch.get_rng_state()
    tried(lambda: own.Path("random"))
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


def test_modules_in_evaluation_mode_are_those_whose_numbers_depend_on_it() -> None:
    network = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Dropout(0.0), nn.Linear(4, 4), nn.Dropout(0.5))
    for name in "0123":
        network.get_submodule(name).eval()
    assert modules_in_evaluation(network) == ("0", "1")
    assert undone(network.train(), ("0", "1")) == ("0", "1")
    network[1].train(False)
    assert undone(network, ("0", "1")) == ("0",)
    assert modules_in_evaluation(network.eval()) == ()
