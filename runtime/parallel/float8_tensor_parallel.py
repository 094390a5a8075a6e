"""Products in 8 bits whose weight is cut over the tensor axis, with the scales that one process would choose.

Model: torchao's `Float8Linear` scales a tensor, or each of its rows, by its largest number. A rank has a share of the
weight, and of the input of a row or of the gradient of a column. Ranks reduce the largest numbers that a cut crosses by
one all-reduce (MAX) in float32, before the cast:

    recipe        column                                      row
    tensorwise    forward, of the weight (1 number);          forward, of the input and the weight (2 numbers)
                  backward, of the gradient (1 number)
    rowwise       backward, of each row of the gradient,      forward, of each row of the input, and of the weight for
                  and of the weight for each input            each output

Contract: each rank rounds its shares to the numbers to which one process rounds them. The product of a row is a partial
sum in 16 bits, as under autocast. The saved tensors and the casts are those of torchao's layer, of a rank's share.

Limits: the two recipes of the language, without fast paths for other configurations of torchao.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.tensor import DTensor, Partial, Shard

from dslc.compiler.trace.private_torch import is_on_its_way

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torchao.float8.float8_linear import Float8Linear


def cut(layer: nn.Module, dim: int, axis: DeviceMesh) -> None:
    """Lets a layer of torchao, cut along `dim` of its weight, scale by the numbers of all ranks of `axis`."""
    layer.forward = CutLayer(layer, dim == 0, axis).forward


class CutLayer:
    """The products of a layer with a share of its weight; its styles give it DTensors, and take one."""

    def __init__(self, layer: Float8Linear, is_column: bool, axis: DeviceMesh) -> None:
        from torchao.float8.config import ScalingGranularity
        from torchao.float8.float8_training_tensor import GemmInputRole, hp_tensor_and_scale_to_float8
        from torchao.float8.float8_utils import amax_to_scale, tensor_to_amax

        self._layer, self.is_column, self.axis, self._tensorwise = layer, is_column, axis, ScalingGranularity.TENSORWISE
        self._roles = {name: getattr(GemmInputRole, name.upper()) for name in ("input", "weight", "grad_output")}
        self._to_scale, self._to_amax, self._to_float8 = amax_to_scale, tensor_to_amax, hp_tensor_and_scale_to_float8

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self._layer.weight, self._layer.bias
        assert isinstance(input, DTensor) and isinstance(weight, DTensor), "styles lay both over the axis"
        output: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            input.to_local(grad_placements=[Partial()] if self.is_column else None),
            weight.to_local().t(),
            bias.to_local() if bias is not None else None,
            self,
        )
        return DTensor.from_local(output, self.axis, [Shard(-1) if self.is_column else Partial()], run_check=False)

    def is_tensorwise(self, role: str) -> bool:
        """True if a factor of a product has one scale."""
        config: Any = getattr(self._layer.config, f"cast_config_{role}")
        return bool(config.scaling_granularity is self._tensorwise)

    def largest(self, matrix: Tensor, role: str, dim: int | None) -> Tensor:
        """Returns the largest number of a rank's share, or of each of its rows or columns; torchao takes -1 and 0."""
        config: Any = getattr(self._layer.config, f"cast_config_{role}")
        amax: Tensor = self._to_amax(matrix, False, None, config.scaling_granularity, dim)
        return amax

    def scale(self, largest: Tensor, role: str) -> Tensor:
        config: Any = self._layer.config
        dtype = getattr(config, f"cast_config_{role}").target_dtype
        scale: Tensor = self._to_scale(largest, dtype, round_scales_to_power_of_2=config.round_scales_to_power_of_2)
        return scale

    def cast(self, matrix: Tensor, scale: Tensor, role: str, dim: int | None) -> Tensor:
        layer: Any = self._layer
        dtype = getattr(layer.config, f"cast_config_{role}").target_dtype
        result: Tensor = self._to_float8(matrix, scale, dtype, layer.linear_mm_config, self._roles[role], dim)
        return result


class _ProductContext(FunctionCtx):
    saved_tensors: tuple[Tensor, Tensor]  # input and weight
    layer: CutLayer
    is_biased: bool
    scales: tuple[Tensor | None, Tensor | None]  # of the input and of the weight


class _Product(torch.autograd.Function):
    """The product of an input (…, inputs) and a transposed weight (inputs, outputs), both a rank's share."""

    @staticmethod
    def forward(ctx: _ProductContext, input: Tensor, weight: Tensor, bias: Tensor | None, layer: CutLayer) -> Tensor:
        input = _arrived(input)
        ctx.save_for_backward(input, weight)
        rows, column = input.reshape(-1, input.shape[-1]), layer.is_column
        by_row = _Cast(layer, rows, "input", dim=1, cut=None if column else 1)
        by_output = _Cast(layer, weight, "weight", dim=0, cut=1 if column else 0)
        _agree(layer.axis, by_row, by_output)
        input_8, weight_8 = by_row.apply(), by_output.apply()
        output = torch.mm(input_8, weight_8)
        if bias is not None:  # each rank of a row adds its part to its partial sum
            output = output + (bias if column else bias / layer.axis.size()).to(output.dtype)
        ctx.layer, ctx.is_biased, ctx.scales = layer, bias is not None, (by_row.scale, by_output.scale)
        return output.reshape(*input.shape[:-1], output.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: _ProductContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        layer, column, (input_scale, weight_scale) = ctx.layer, ctx.layer.is_column, ctx.scales
        gradient = _arrived(gradient)
        rows = gradient.reshape(-1, gradient.shape[-1])
        by_row = _Cast(layer, rows, "grad_output", dim=1, cut=1 if column else None)
        by_input = _Cast(layer, weight, "weight", dim=1, cut=1 if column else 0, scale=weight_scale)
        _agree(layer.axis, by_row, by_input)
        # torchao keeps both casts up to the end, too: the account has them.
        gradient_8, weight_8 = by_row.apply(), by_input.apply()
        of_input = torch.mm(gradient_8, weight_8.t()).reshape(input.shape)
        by_output = _Cast(layer, rows, "grad_output", dim=0, cut=1 if column else None, scale=by_row.scale)
        inputs = input.reshape(-1, input.shape[-1])
        by_column = _Cast(layer, inputs, "input", dim=0, cut=None if column else 1, scale=input_scale)
        _agree(layer.axis, by_output, by_column)
        gradient_8_by_output, input_8 = by_output.apply(), by_column.apply()
        of_weight = torch.mm(gradient_8_by_output.t(), input_8).t()
        return of_input, of_weight, rows.sum(0) if ctx.is_biased else None, None


class _Cast:
    """A cast of a matrix by one scale, or by one for each row (`dim` 1) or column (0). `cut` is the dim along which a
    rank has a share. `scale`: the scale of the same matrix in an earlier cast, which holds for a whole tensor alone.
    """

    def __init__(
        self, layer: CutLayer, matrix: Tensor, role: str, *, dim: int, cut: int | None, scale: Tensor | None = None
    ) -> None:
        is_tensorwise = layer.is_tensorwise(role)
        self._layer, self._matrix, self._role = layer, matrix, role
        self._dim = None if is_tensorwise else -1 if dim else 0
        self.scale = scale if is_tensorwise else None
        self.largest = torch.empty(0)
        self.is_crossed = False
        if self.scale is None:
            self.largest = layer.largest(matrix, role, self._dim)
            self.is_crossed = cut is not None and (is_tensorwise or cut == dim)

    def apply(self) -> Tensor:
        """Returns the matrix in 8 bits."""
        if self.scale is None:
            self.scale = self._layer.scale(self.largest, self._role)
        return self._layer.cast(self._matrix, self.scale, self._role, self._dim)


def _agree(axis: DeviceMesh, *casts: _Cast) -> None:
    """Reduces the largest numbers that the cut of a matrix crosses, over all ranks of the axis."""
    crossed = [cast for cast in casts if cast.is_crossed]
    if not crossed:
        return
    largest = torch.cat([cast.largest.flatten().float() for cast in crossed])
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=axis.get_group())
    parts = largest.split([cast.largest.numel() for cast in crossed])
    for cast, part in zip(crossed, parts, strict=True):
        cast.largest = part.view_as(cast.largest)


def _arrived(tensor: Tensor) -> Tensor:
    """Waits for the result of a functional collective."""
    if is_on_its_way(tensor):
        tensor = tensor.wait()  # type: ignore[attr-defined]
    return tensor
