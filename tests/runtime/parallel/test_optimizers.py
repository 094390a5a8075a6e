"""Optimizers are torch's, with torch's numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.made_programs import optimizer_step
from helpers.paths import ROOT
from torch import nn

from dslc.compiler.ir.program import GroupStep
from dslc.dsl.language.optimizers import Optimizer, torch_optimizer
from dslc.dsl.language.registry import CALLS, fields
from dslc.runtime.loop.plain_loop import plain_optimizer
from dslc.runtime.measure.track_memory import Tracker
from dslc.runtime.parallel.optimizers import OWN_CLASSES, build_optimizer

CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "dampening": 0.0}),
    ("Adam", {"betas": (0.8, 0.99), "eps": 1e-7, "weight_decay": 0.02, "amsgrad": True}),
    ("AdamW", {"betas": (0.9, 0.95), "weight_decay": 0.1}),
    ("Adagrad", {"lr_decay": 0.01, "weight_decay": 0.01, "eps": 1e-9}),
    ("RMSprop", {"alpha": 0.9, "momentum": 0.5, "centered": True}),
    ("NAdam", {"momentum_decay": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("Adafactor", {"beta2_decay": -0.7, "d": 1.1, "weight_decay": 0.1}),
]
# Every optimizer of the language that runs.
RUNNING: list[type[Optimizer]] = [
    call  # type: ignore[misc]
    for call in CALLS["optimizer"].values()
    if call.torch_class or call.__name__ in OWN_CLASSES  # type: ignore[attr-defined]
]


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def trained(build: Any) -> torch.Tensor:
    model = layers()
    optimizer = build(model)
    inputs = torch.randn(20, 8, 6)
    for piece in inputs:
        optimizer.zero_grad()
        model(piece).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(("kind", "arguments"), CASES)
def test_twenty_steps_are_those_of_torchs_plain_loop(kind: str, arguments: dict[str, Any]) -> None:
    step = optimizer_step(kind, lr=0.02, **arguments)
    ours = trained(lambda model: build_optimizer(step, model))
    plain = trained(lambda model: getattr(torch.optim, kind)(model.parameters(), lr=0.02, foreach=False, **arguments))
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=2e-6)
    other = trained(lambda model: build_optimizer(optimizer_step(kind, lr=0.021, **arguments), model))
    assert (other - plain).abs().max() > 1e-4, "the test can tell one rate from another"


@pytest.mark.parametrize(
    ("kind", "arguments", "other"),
    [
        ("Lion", {"betas": (0.8, 0.95), "weight_decay": 0.0}, {"betas": (0.8, 0.9)}),
        ("Lion", {"betas": (0.8, 0.95), "weight_decay": 0.1}, {"weight_decay": 0.2}),
        ("Muon", {"momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}, {"momentum": 0.8}),
        ("Muon", {"nesterov": False, "adamw_lr": 0.01, "weight_decay": 0.2}, {"adamw_lr": 0.02}),
    ],
)
def test_twenty_steps_are_those_by_hand(kind: str, arguments: dict[str, Any], other: dict[str, Any]) -> None:
    """By hand, in the plain loop of `dslc verify`, Lion is its paper's update, and Muon is torch's with torch's AdamW.
    Groups have rates and decays of their own.
    """
    groups = (GroupStep(parameters=("2.*",), lr=0.003, weight_decay=0.2),)
    step = replace(optimizer_step(kind, lr=0.01, **arguments), groups=groups, no_decay=("0.bias",))
    if kind == "Muon":
        step = replace(step, adamw=(("2.weight", "the head"),))
        on_device = {group["adamw"]: group["fused"] for group in build_optimizer(step, layers()).param_groups}
        assert on_device == {True: True, False: False}, "where a checkpoint loads the count of steps"
    ours, plain = trained(lambda m: build_optimizer(step, m)), trained(lambda m: plain_optimizer(step, m))
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-6)
    changed = trained(lambda m: build_optimizer(replace(step, arguments={**step.arguments, **other}), m))
    assert (changed - plain).abs().max() > 1e-3, "the test can tell one argument from another"


@pytest.mark.parametrize(("kind", "arguments"), [*CASES, ("Lion", {"weight_decay": 0.1})])
@pytest.mark.parametrize("skipped", [0, 2])
def test_a_step_whose_gradient_overflows_leaves_nothing_behind(
    kind: str, arguments: dict[str, Any], skipped: int
) -> None:
    step = optimizer_step(kind, lr=0.02, skipping=True, **arguments)
    found: list[torch.Tensor] = []
    for gradients in ([0.1, 0.2, 0.3], [0.1, 0.2, 0.3]):
        if found:
            gradients.insert(skipped, math.inf)
        model = nn.Linear(40, 2)
        nn.init.ones_(model.weight)
        optimizer = build_optimizer(step, model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, backoff_factor=1.0 - 2**-20)
        for gradient in gradients:
            torch.full((80,), 1e30)  # is freed, and its numbers are what the next tensor begins with
            scaler.scale(torch.zeros(()))
            model.weight.grad = torch.full_like(model.weight, gradient)
            scaler.step(optimizer)
            scaler.update()
        found.append(model.weight.detach())
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("call", RUNNING)
def test_every_argument_of_the_language_is_one_of_torch(call: type[Optimizer]) -> None:
    declared = {field.name: field.default for field in fields(call) if field.name not in call.apart + call.rates}
    declared |= call().more
    step = replace(optimizer_step(call.torch_class or call.__name__, lr=0.1), arguments=declared)
    if call.rates:
        step = replace(step, arguments=declared | dict.fromkeys(call.rates, 0.1))
    optimizer = build_optimizer(step, nn.Linear(2, 2))
    assert optimizer.param_groups[0].items() >= declared.items()
    assert optimizer.param_groups[0]["initial_lr"] == 0.1


def test_a_tied_parameter_counts_once_and_a_frozen_one_not() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    (group,) = build_optimizer(optimizer_step("SGD", lr=0.1), model).param_groups
    assert [id(p) for p in group["params"]] == [id(model[0].weight), id(model[1].bias)]


def test_what_matches_a_pattern_does_not_decay() -> None:
    """A parameter is named by any of its names; the rest decays, and every parameter is in one group."""
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    step = optimizer_step("AdamW", lr=0.1, no_decay=("*.bias", "2.w*"), weight_decay=0.5)
    decaying, still = build_optimizer(step, model).param_groups
    assert [named[id(p)] for p in decaying["params"]] == ["1.weight"]
    assert [named[id(p)] for p in still["params"]] == ["0.weight", "0.bias", "1.bias", "2.bias"]
    assert (decaying["weight_decay"], still["weight_decay"]) == (0.5, 0.0)
    assert decaying["initial_lr"] == still["initial_lr"] == 0.1
    everything = optimizer_step("SGD", lr=0.1, no_decay=("*",), weight_decay=0.5)
    (group,) = build_optimizer(everything, model).param_groups
    assert group["weight_decay"] == 0.0


def test_groups_have_rates_and_decays_of_their_own() -> None:
    """A parameter is in the first group that matches one of its names; the groups come after the rest."""
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = (GroupStep(parameters=("2.*",), lr=0.5), GroupStep(parameters=("*.weight",), weight_decay=0.2))
    step = replace(optimizer_step("AdamW", lr=0.1, no_decay=("*.bias", "1.*"), weight_decay=0.5), groups=groups)
    found = [
        ([named[id(p)] for p in group["params"]], group["initial_lr"], group["weight_decay"])
        for group in build_optimizer(step, model).param_groups
    ]
    assert found == [
        (["0.bias", "1.bias"], 0.1, 0.0),
        (["0.weight"], 0.5, 0.5),
        (["2.bias"], 0.5, 0.0),
        (["1.weight"], 0.1, 0.2),
    ]


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *CASES,
    ("Lion", {}),
    ("Muon", {}),
    ("Muon", {"nesterov": False}),
    ("RMSprop", {"weight_decay": 0.1}),
    ("NAdam", {"weight_decay": 0.1}),
]


@pytest.mark.parametrize(("kind", "arguments"), VARIANTS)
@pytest.mark.parametrize("fused", [True, False])
def test_the_registration_says_what_torch_keeps_and_makes(kind: str, arguments: dict[str, Any], fused: bool) -> None:
    declared = torch_optimizer(kind)(**arguments)
    step = optimizer_step(kind, lr=0.02, **arguments)
    fused = fused and "cpu" in step.fused
    model = nn.Linear(500, 400)
    optimizer = build_optimizer(step if fused else replace(step, fused=()), model)
    tracker = Tracker(model, optimizer, torch.device("cpu"))
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        with tracker.step():
            optimizer.step()
    kept = {name: value for name, value in optimizer.state[model.weight].items() if value is not None}
    state = [value for name, value in kept.items() if name in declared.state]
    assert sum(value.nbytes for value in state) == declared.state_bytes(model.weight.shape, model.weight.numel())
    assert kept.keys() - declared.counts <= set(declared.state)
    assert {name for name, value in kept.items() if value.shape == ()} == set(declared.counts)
    made = sum(tracker.peak.values()) - sum(tracker.rest.values())
    own = [q for q in model.parameters() if q.dim() == 2 or declared.fallback is None]
    shapes = [(tuple(parameter.shape), parameter.numel()) for parameter in own]
    packed = 0.15 * (kind == "Muon")  # oneDNN packs a matrix for products in bfloat16
    assert made == pytest.approx(0 if fused else declared.scratch_bytes(shapes), abs=200, rel=packed)


def test_a_registration_is_all_that_an_optimizer_needs() -> None:
    """NAdam was added by its registration alone: nothing else names it, but for the configurations of other tools."""
    files = [path for floor in ("cli", "compiler", "runtime", "dsl") for path in (ROOT / floor).rglob("*.py")]
    named = [path.name for path in files if "nadam" in path.read_text().lower() and "conversion" not in path.parts]
    assert named == ["optimizers.py"]
