"""The names of parameters. A tied parameter is one tensor with several names, and each name stands for the tensor.

Every field of a job that names parameters asks here: `freeze`, `no_decay`, `groups` and an adapter's `save`. So a
pattern means the same for each plan, also where a pipeline stage has one of the names alone.

Model of adapters: the library `peft` puts a layer with an adapter into the place of a dense layer `x`. The layer itself
becomes `x.base_layer`, the two matrices are `x.lora_A.default.weight` and `x.lora_B.default.weight`. Files know the
weight by its name without the adapter, `x.weight`.

Model of stacks of experts: `transformers` marks a class of experts with `use_experts_implementation`, which says how
its weights lie. Its forward pass takes tokens, the experts of each token and their weights. Known is one layout, of
Mixtral, Qwen 3 MoE, OLMoE and DeepSeek-V3: `gate_up_proj` (experts, 2 * hidden, width) and `down_proj` (experts, width,
hidden), without biases. peft puts a wrapper around the module for each stack with an adapter, one around the other. The
inner one is of `gate_up_proj`, which the module has first. A wrapper's `lora_A` has `rank` rows for each expert. The
columns of its `lora_B` have the experts innermost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar


def matches(patterns: Iterable[str], name: str) -> bool:
    """True if one of the patterns is of this name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class ParameterNames:
    """All names of each parameter of a network. The first name in the network's order identifies the parameter."""

    def __init__(self, names: Iterable[str], ties: Iterable[tuple[str, str]] = ()) -> None:
        """`ties` are pairs of a further name and the first name of the same tensor."""
        self._first = dict(ties)
        self._all: dict[str, list[str]] = {}
        for name in (*names, *self._first):
            own = self._all.setdefault(self.first_name(name), [])
            if name not in own:
                own.append(name)

    def first_name(self, name: str) -> str:
        """Returns the first name of the parameter that `name` is a name of."""
        return self._first.get(name, name)

    def all_names(self, name: str) -> tuple[str, ...]:
        """Returns all names of the parameter that `name` is a name of, the first name first."""
        first = self.first_name(name)
        return tuple(sorted(self._all.get(first, (first,)), key=lambda each: each != first))

    def match(self, patterns: Sequence[str], name: str) -> bool:
        """True if one of the patterns is of any name of the parameter that `name` is a name of."""
        return any(matches(patterns, each) for each in self.all_names(name))

    def matching(self, patterns: Sequence[str]) -> frozenset[str]:
        """Returns the first names of the parameters that a pattern is of, by any of their names."""
        return frozenset(first for first in self._all if patterns and self.match(patterns, first))

    def group(self, groups: Sequence[Sequence[str]], name: str) -> int:
        """Returns the number, from 1, of the first of some lists of patterns that matches a parameter; 0 if none does.

        Any name of the parameter counts. Where two names are in two groups, the group that is written first has the
        parameter.
        """
        return next((number for number, patterns in enumerate(groups, 1) if self.match(patterns, name)), 0)


T = TypeVar("T")

BASE = "base_layer"
FIRST, SECOND = "lora_A.default", "lora_B.default"
_OWN = re.compile(r"(.*\.)?lora_[AB]\.default\.weight")
_PARTS = frozenset({BASE, "lora_A", "lora_B"})


def targeted(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Returns a function that is True for names of modules that one of the patterns matches, whole or at the end.
    peft's `target_modules` match so: `q_proj` matches `layers.0.q_proj`. `*` is any text.
    """
    return partial(matches, [form for each in patterns for form in (each, f"*.{each}")])


def is_of_adapter(name: str) -> bool:
    """True if a parameter is one of an adapter's own."""
    return _OWN.fullmatch(name) is not None


def base_name(name: str) -> str:
    """Returns the name of a tensor in the network without adapters. The tensor must not be an adapter's own."""
    return ".".join(part for part in name.split(".") if part != BASE)


def without_adapters(tensors: Mapping[str, T]) -> dict[str, T]:
    """Returns the values by the names of tensors without adapters, except for the adapters' own tensors."""
    return {base_name(name): value for name, value in tensors.items() if not is_of_adapter(name)}


def drawn_name(name: str) -> str:
    """Returns the name from which the first numbers of a parameter follow: the name in the network without adapters, or
    of an adapter's own tensor the name in its file.
    """
    return file_name(name) if is_of_adapter(name) else base_name(name)


def file_name(name: str) -> str:
    """Returns the name of an adapter's tensor in the file of an adapter alone, without peft's prefix."""
    return name.replace(".default.", ".")


# ------------------------------------------------------------------------------------------------ stacks of experts

STACKS = ("gate_up_proj", "down_proj")
_LAYOUT = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
}


def is_stack(module: Any) -> bool:
    """True of a module whose experts can be shared out over ranks, and have adapters."""
    if any(getattr(module, name, None) is not value for name, value in _LAYOUT.items()):
        return False
    gate = getattr(type(module), "_apply_gate", None)  # a class may have its own
    if getattr(gate, "__module__", "") != "transformers.integrations.moe" or not hasattr(module, "act_fn"):
        return False
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    if shapes.keys() != {*STACKS} or any(len(shape) != 3 for shape in shapes.values()):
        return False
    experts, width, hidden = shapes["down_proj"]
    return shapes["gate_up_proj"] == (experts, 2 * hidden, width)


def adapted_stack(layer: str, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Returns the stored name of the stack that the adapter of `layer` changes; None if it changes a dense layer.

    `shapes` are those of a network's parameters, or of a checkpoint's tensors. The outputs and inputs of an adapter
    tell the two stacks of a module apart.
    """
    outputs, inputs = shapes[f"{layer}.{SECOND}.weight"][0], shapes[f"{layer}.{FIRST}.weight"][1]
    for wrappers in range(1, len(STACKS) + 1):
        for stack in STACKS:
            name = f"{layer}{wrappers * f'.{BASE}'}.{stack}"
            if shapes.get(name, ())[1:] == (outputs, inputs):
                return name
    return None


def target_of(layer: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Returns how `targets` names what the adapter of `layer` changes: a dense layer, or a stack of experts."""
    stack = adapted_stack(layer, shapes)
    return base_name(stack) if stack is not None else base_name(f"{layer}.")[:-1]


def targets_stack(targets: Sequence[str], stack: str) -> bool:
    """True if a target names a stack of experts, `x.experts.down_proj`. It names the module too, as in
    `"experts.down_proj"`: a pattern of projections alone, such as `"*_proj"`, is one of dense layers.
    """
    module = stack.split(".")[-2]
    return targeted([target for target in targets if module in target])(stack)


def layers_with(names: Iterable[str]) -> list[str]:
    """Returns the layers that have an adapter, given the names of all parameters."""
    return [name.removesuffix(f".{FIRST}.weight") for name in names if f".{name}".endswith(f".{FIRST}.weight")]


class AdapterNames:
    """The adapter of a network whose layers are dslc's own: what it changes and what trains, by names."""

    def __init__(self, targets: Sequence[str], save: Sequence[str]) -> None:
        self._targets, self._is_target, self._is_saved = targets, targeted(targets), targeted(save)

    def has_adapter(self, layer: str) -> bool:
        """True if a dense layer has an adapter; not of what an adapter is made of."""
        return not _PARTS.intersection(layer.split(".")) and self._is_target(layer)

    def stacks_of(self, experts: str) -> tuple[str, ...]:
        """Returns the stacks of a module of experts that have an adapter."""
        return tuple(stack for stack in STACKS if targets_stack(self._targets, f"{experts}.{stack}"))

    def trains(self, parameter: str) -> bool:
        """True if a parameter is an adapter's own, or in a module that trains whole."""
        parts = base_name(parameter).split(".")
        saved = (self._is_saved(".".join(parts[:n])) for n in range(1, len(parts)))
        return is_of_adapter(parameter) or any(saved)

    def marks(self, parameters: Iterable[str]) -> list[tuple[bool, tuple[str, ...], bool]]:
        """Returns for each parameter whether its module has an adapter, on which stacks, and whether it trains."""
        return [
            (self.has_adapter(module), self.stacks_of(module), self.trains(name))
            for name in parameters
            for module in [base_name(name).rpartition(".")[0]]
        ]
