"""Experts of dslc's own layers with an adapter for each expert (LoRA, Hu et al. 2021, arXiv:2106.09685).

Model: as the library `peft` does, each stack with an adapter puts a module around the experts, one around the other.
The inner one is of `gate_up_proj`. A module holds the two matrices, of all experts, and passes rows on; the experts
inside multiply rows by the weight and by both matrices (library_experts.py). Names and shapes are peft's.

Contract: the experts' own parameters may be of some experts; `first` is the number of the first one.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from dslc.runtime.model.experts.expert_modules import Experts
from dslc.runtime.model.experts.library_experts import StackAdapters, sorted_results


class ExpertsInside(Experts):
    """Experts whose stacks have adapters, which are the modules around them."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__(experts, width, hidden)
        self.first = 0
        self.adapters = StackAdapters()
        self.act_fn = F.silu

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Returns the experts' results, (rows, width), as `Experts` does."""
        return sorted_results(self, rows, counts, self.first)


class AdaptedExperts(nn.Module):
    """The adapter of the last of some `stacks`, around the experts, or around the adapter of the stack before it."""

    def __init__(self, experts: int, width: int, hidden: int, stacks: tuple[str, ...], rank: int, scale: float) -> None:
        super().__init__()
        *inner_stacks, stack = stacks
        self.base_layer: nn.Module = ExpertsInside(experts, width, hidden)
        if inner_stacks:
            self.base_layer = AdaptedExperts(experts, width, hidden, tuple(inner_stacks), rank, scale)
        inputs, outputs = (width, 2 * hidden) if stack == "gate_up_proj" else (hidden, width)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, experts * rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank * experts, outputs, bias=False)})
        self.num_experts = experts
        self.scaling = {"default": scale}
        self._disable_adapters = False  # `switched_off` sets it
        innermost(self).adapters.of_stack[stack] = self

    @property
    def disable_adapters(self) -> bool:
        """True while the network computes without its adapters."""
        return self._disable_adapters

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Returns the experts' results; the experts inside add the adapter's."""
        results: Tensor = self.base_layer(rows, counts)
        return results


def innermost(experts: Any) -> Any:
    """Returns the module with the experts' own parameters."""
    while isinstance(experts, AdaptedExperts):
        experts = experts.base_layer
    return experts
