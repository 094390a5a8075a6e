"""Weights that `fully_shard` gathers in 8 bits, for products that would round them to the same numbers.

Model (torchao's `enable_fsdp_float8_all_gather`): a rank casts its rows by the scale of the whole weight, which follows
from the largest number of all ranks' rows, before they are gathered. So a quarter of the bytes travel, and the layer
gets a weight in 8 bits. Before the passes of a step one all-reduce (MAX, float32) has the largest numbers of all such
weights. Elsewhere, as in evaluation, the same takes place before a forward pass if weights have changed.

Contract: parameters stay DTensors of float32 rows, for the optimizer, checkpoints and averages. The numbers are those
of a gather in float32. Each rank has the same number of rows; a weight has one name.

Limits: torchao's tensorwise recipe, where one cast serves the forward and the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslc.compiler.ir.steps import PrecisionStep
from dslc.compiler.trace.private_torch import is_distributed, local_part, times_written
from dslc.runtime.technique.float8 import layer_of


class Float8Gather:
    """The weights of `layers` in one root of `fully_shard`; the ranks of `group` have the rows.

    `fully_shard` finds the functions of a weight as attributes of a rank's rows, before its first gather and at each.
    """

    def __init__(self, layers: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
        from torchao.float8.float8_utils import amax_to_scale

        self._layers: list[Any] = list(layers)
        self._group, self._to_scale = group, amax_to_scale
        self._scaled: list[tuple[int, int]] = []  # of each weight: its rows, and how often they had been written

    def update(self) -> None:
        """Computes the scales anew."""
        rows = [local_part(layer.weight) for layer in self._layers]
        dtype = self._layers[0].config.cast_config_weight.target_dtype
        with torch.no_grad():
            largest = torch.stack([torch.linalg.vector_norm(part, float("inf")) for part in rows])
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
            scales = self._to_scale(largest, dtype)
        for layer, part, scale in zip(self._layers, rows, scales, strict=True):
            part.fsdp_pre_all_gather = functools.partial(_cast_rows, layer, part, scale)  # type: ignore[attr-defined]
            part.fsdp_post_all_gather = functools.partial(_wrap, layer)  # type: ignore[attr-defined]
        self._scaled = self._state()

    def update_if_written(self, *_: object) -> None:
        """Computes the scales anew if weights have changed, which they do on all ranks alike. Weights that are gathered
        have not.
        """
        if all(is_distributed(layer.weight) for layer in self._layers) and self._scaled != self._state():
            self.update()

    def _state(self) -> list[tuple[int, int]]:
        rows = [local_part(layer.weight) for layer in self._layers]
        return [(id(part), times_written(part)) for part in rows]


def _cast_rows(layer: Any, rows: Tensor, scale: Tensor, mesh: object) -> tuple[tuple[Tensor], tuple[Tensor]]:
    """Returns a rank's rows as bytes, and what `_wrap` is given."""
    from torchao.float8.float8_training_tensor import GemmInputRole, hp_tensor_and_scale_to_float8

    dtype, role = layer.config.cast_config_weight.target_dtype, GemmInputRole.WEIGHT
    cast: Any = hp_tensor_and_scale_to_float8(rows.detach(), scale, dtype, layer.linear_mm_config, role)
    return (cast._data.view(torch.uint8),), (scale,)


def _wrap(
    layer: Any, gathered: tuple[Tensor, ...], scales: tuple[Tensor], dtype: torch.dtype, *, out: Any = None
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """Returns the weight around the gathered bytes; a weight that exists already, `out`, gets the scale alone."""
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

    (data,), (scale,) = gathered, scales
    if out is not None:
        out._scale = scale
        return None
    kind, config = layer.config.cast_config_weight.target_dtype, layer.linear_mm_config
    weight: Tensor = Float8TrainingTensor(data.view(kind), scale, dtype, config, gemm_input_role=GemmInputRole.WEIGHT)
    return weight, (data,)


def apply(
    step: PrecisionStep, model: nn.Module, roots: Sequence[nn.Module], group: dist.ProcessGroup
) -> list[Callable[[], None]]:
    """Lets `fully_shard` gather weights of each root in 8 bits, if the step says so, over the ranks of `group`. Returns
    the functions to call before each step.
    """
    names = step.float8.gathered if step.float8 is not None else ()
    layers = [layer for name in names if (layer := layer_of(model, name)) is not None]
    updates: list[Callable[[], None]] = []
    for root in roots:
        modules = set(root.modules())
        own = [layer for layer in layers if layer in modules]
        if own:
            gather = Float8Gather(own, group)
            root.register_forward_pre_hook(gather.update_if_written, prepend=True)
            updates.append(gather.update)
    return updates
