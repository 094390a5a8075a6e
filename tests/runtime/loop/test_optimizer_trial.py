"""What is found of a user's optimizer by trying it, and what is said of one that is none."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.paths import HELPERS

from dslc.compiler.ir.network_facts import OptimizerFacts
from dslc.compiler.ir.program import OptimizerStep, PythonFunction
from dslc.runtime.loop.optimizer_trial import Named, try_out
from dslc.runtime.parallel.custom_optimizer import OptimizerError

NAMED: list[Named] = [
    (("embedding.weight", "head.weight"), (33, 16)),
    (("0.weight",), (16, 24)),
    (("0.bias",), (16,)),
    (("1.weight",), (16, 8, 3, 3)),
]


def tried(name: str, named: list[Named] | tuple[()] = NAMED, **arguments: Any) -> OptimizerFacts:
    full = name if ":" in name else f"own_optimizers:{name}"
    function = PythonFunction(function=full, folder=str(HELPERS), arguments=arguments)
    return try_out(OptimizerStep(kind=name, lr=0.01, state=(), counts=(), fused=(), python=function), named)


def bytes_of(facts: OptimizerFacts) -> dict[str, dict[str, tuple[str, int]]]:
    """The states of each parameter, by their names: form and bytes."""
    return {
        name: {fact.name: (fact.form, fact.bytes) for fact in facts.kinds[kind]} for name, kind, _ in facts.parameters
    }


def test_one_that_treats_each_number_alone() -> None:
    facts = tried("Lion")
    assert set(map(str, bytes_of(facts).values())) == {"{'exp_avg': ('like', 4)}"}
    assert (facts.alone, facts.rows, facts.draws, facts.unkept, facts.at_once) == ("", "", False, False, False)
    assert [scratch for _, _, scratch in facts.parameters] == [4 * 33 * 16, 4 * 16 * 24, 4 * 16, 4 * 16 * 8 * 9]
    assert facts.decays and not tried("Adam8").decays


def test_one_that_needs_whole_matrices() -> None:
    facts = tried("Muon")
    found = bytes_of(facts)
    assert found["0.weight"] == {"momentum_buffer": ("like", 4)}
    assert found["embedding.weight"] == {"exp_avg": ("like", 4), "exp_avg_sq": ("like", 4), "step": ("plain", 0)}
    assert facts.alone == "" and not facts.unkept
    assert facts.rows == "the update of rows of `0.weight` is another without the rest of it"
    assert tried("Muon", besides=["weight"]).rows == "", "Adam for all"


def test_one_whose_state_has_another_shape() -> None:
    facts = tried("Adam8")
    blocks = -(-16 * 24 // 32)
    assert bytes_of(facts)["0.weight"]["first"] == ("other", 32 * blocks)
    assert bytes_of(facts)["0.weight"]["first_scale"] == ("other", 4 * blocks)
    assert facts.group_state == ("step",) and not facts.unkept
    assert facts.rows == "what it keeps as `first` of `embedding.weight` has neither its shape nor one number"


@pytest.mark.parametrize("name", ["Together", "Noisy", "Forgetful"])
def test_others(name: str) -> None:
    facts = tried(name)
    assert bool(facts.alone) is (name == "Together") and bool(facts.rows) is (name == "Together")
    assert facts.draws is (name == "Noisy") and facts.unkept is (name == "Forgetful")


@pytest.mark.parametrize("search", ["strong_wolfe", None])
def test_one_with_a_closure_is_measured_when_its_state_no_longer_grows(search: str | None) -> None:
    facts = tried("own_closures:lbfgs", history_size=3, line_search_fn=search)
    count = 33 * 16 + 16 * 24 + 16 + 16 * 8 * 9
    found = bytes_of(facts)["embedding.weight"]
    assert found["old_dirs"] == found["old_stps"] == ("other", 3 * 4 * count) and found["d"] == ("other", 4 * count)
    assert facts.closure and not facts.unkept and not facts.draws


def test_one_with_a_closure_may_keep_tensors_like_its_parameters() -> None:
    facts = tried("own_closures:Sam")
    assert set(map(str, bytes_of(facts).values())) == {"{'momentum_buffer': ('like', 4), 'old': ('like', 4)}"}
    assert facts.closure and not facts.unkept and not tried("Lion").closure
    assert tried("own_closures:SamWithDefault") == facts, "by a step without one, which fails"
    assert tried("own_closures:SamByName") == tried("own_closures:SamByNameWithDefault") == facts


def test_without_a_model_it_is_tried_on_some_shapes() -> None:
    assert tried("Lion", ()).rows == "" and tried("Muon", ()).rows


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_optimizer", "it gives a float, and should give a torch.optim.Optimizer"),
        ("without_one", "its groups lack `embedding.weight`"),
        ("Steady", "does not depend on the `lr` of its groups"),
        ("own_closures:NeverCalls", "its `step` takes a closure and does not call it"),
        ("own_closures:GradientsFirst", "its `step` uses gradients before it calls the closure"),
        (
            "own_closures:FailsEitherWay",
            r"fails without a closure \(AssertionError: it needs a closure\) and with one \(KeyError: 'rho'\)",
        ),
        ("KeepsAList", "it keeps `past` of a parameter as a list"),
    ],
)
def test_what_cannot_be_used(name: str, said: str) -> None:
    with pytest.raises(OptimizerError, match=said):
        tried(name)
