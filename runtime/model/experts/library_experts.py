"""The experts of networks of `transformers` in dslc's own forward pass: with adapters, or shared among ranks.

Model: a stack of experts with an adapter (`target_parameters` of the library `peft`) multiplies rows by the weight and
by the two small matrices of each expert. peft adds the product of these to the weight before each pass. The results are
the same but for rounding, and no second stack exists.

Contract: `adapt_experts` takes a module in which peft has put its wrappers. Names and parameters stay. The matrices of
an adapter are of all experts, also on a rank that holds some of the stack. Their gradient there is 0 for the experts
of other ranks, so that a sum over the ranks completes it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dslc.compiler.ir.parameter_names import is_stack
from dslc.runtime.model.experts.expert_modules import cast_for_product, grouped_linear, results_of_pairs

_STEP = 8  # numbers that a row of a grouped product is a multiple of: 16 bytes in 16 bits


def adapt_experts(module: nn.Module) -> None:
    """Lets the stacks of experts that have adapters compute by this module, in place."""
    part: Any
    for part in list(module.modules()):
        if not hasattr(part, "parameter_name"):
            continue
        stack: Any = part.get_base_layer()
        if not is_stack(stack):
            continue
        if not isinstance(stack, _AdaptedLibraryExperts):
            stack.__class__ = _derived(_AdaptedLibraryExperts, type(stack))
            stack.adapters = StackAdapters()
        stack.adapters.of_stack[part.parameter_name] = part
        part.__class__ = _derived(_Passing, type(part))


def sorted_results(experts: Any, rows: Tensor, counts: Tensor, first: int = 0) -> Tensor:
    """Returns the results of `rows` (n, width), which are sorted by expert; `counts` has the rows of each expert that
    `experts` holds, of which `first` is the number of the first one.
    """
    ends = counts.cumsum(0).to(torch.int32)
    gate, up = _linear(experts, "gate_up_proj", rows, ends, first).chunk(2, -1)
    return _linear(experts, "down_proj", experts.act_fn(gate) * up, ends, first)


def weighted_sum(results: Tensor, weights: Tensor, tokens: Tensor) -> Tensor:
    """Returns the sum of each token's results by weight, in the dtype of the tokens, as the library sums them."""
    return (results * weights.unsqueeze(-1)).sum(1).to(tokens.dtype)


def count_rows(chosen: Tensor, experts: int) -> Tensor:
    """Returns the rows of each expert, from the experts of each token."""
    pairs = chosen.flatten()
    counts = torch.zeros(experts, dtype=torch.int64, device=pairs.device)
    return counts.scatter_add_(0, pairs, torch.ones_like(pairs))


class StackAdapters:
    """The adapters of a module's stacks, hidden from torch, in whose tree they are around the module."""

    def __init__(self) -> None:
        self.of_stack: dict[str, Any] = {}


class _AdaptedLibraryExperts(nn.Module):
    """A module of the library with adapters."""

    adapters: StackAdapters

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Returns the sum of the results of each token's experts (tokens, top_k), by their weights."""
        experts: Any = self
        counts = count_rows(chosen, experts.down_proj.shape[0])
        results = results_of_pairs(
            cast_for_product(tokens), chosen, counts, lambda rows, counts: sorted_results(experts, rows, counts)
        )
        return weighted_sum(results, weights, tokens)


class _Passing:
    """A wrapper of peft that lets the module inside add the adapter."""

    base_layer: nn.Module

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.base_layer(*arguments, **options)


_classes: dict[tuple[type, type], type] = {}


def _derived(base: type, kind: type) -> type:
    """Returns a class of the name of `kind` that has its methods, and before them those of `base`."""
    if (base, kind) not in _classes:
        _classes[base, kind] = type(kind.__name__, (base, kind), {"__module__": kind.__module__})
    return _classes[base, kind]


def _linear(experts: Any, name: str, rows: Tensor, ends: Tensor, first: int) -> Tensor:
    """Returns each row times the transposed matrix of its expert, and times those of the adapter, if there is one."""
    results = grouped_linear(rows, getattr(experts, name), ends)
    adapters = getattr(experts, "adapters", None)
    adapter = adapters.of_stack.get(name) if adapters is not None else None
    if adapter is None or adapter.disable_adapters:
        return results
    down, up = _matrices(adapter, slice(first, first + ends.shape[0]))
    (scale,) = adapter.scaling.values()
    change: Tensor = scale * grouped_linear(grouped_linear(rows, down, ends), up, ends)
    return results + change


def _matrices(adapter: Any, held: slice) -> tuple[Tensor, Tensor]:
    """Returns the matrices (experts, rank, inputs) and (experts, outputs, rank) of the experts that are held.

    Zeros widen a rank that a grouped product does not take.
    """
    (down,), (up,) = adapter.lora_A.values(), adapter.lora_B.values()
    of_down = down.weight.unflatten(0, (adapter.num_experts, -1))[held]
    of_up = up.weight.unflatten(1, (-1, adapter.num_experts)).permute(2, 0, 1)[held]
    missing = -of_down.shape[1] % _STEP
    if missing:
        of_down, of_up = F.pad(of_down, (0, 0, 0, missing)), F.pad(of_up, (0, missing))
    return of_down.contiguous(), of_up.contiguous()
