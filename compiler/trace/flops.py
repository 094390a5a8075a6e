"""FLOPs of operations, two for each multiply-add of products, convolutions and attention; the dtypes of products."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache

import torch
from torch import Tensor

from dslc.compiler.trace.instantiate import TraceError, dtype_name
from dslc.compiler.trace.private_torch import (
    GROUPED_PRODUCT,
    Argument,
    Arguments,
    Operator,
    Options,
    flash_attention_on_cpu,
    flash_attention_on_cpu_backward,
    overloads_of,
)
from dslc.compiler.trace.run import tensors_of

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear")


def flops_of(func: Operator, args: Arguments, kwargs: Options, result: object) -> int | None:
    """Returns the FLOPs of an operation; None for one that is not counted."""

    formula = formulas().get(overloads_of(func))
    return None if formula is None else int(formula(*args, **kwargs, out_val=result))


@cache
def formulas() -> dict[object, Callable[..., int]]:
    """Returns functions of an operation's arguments and result: torch's own, and those for the CPU's kernels that torch
    lacks.
    """
    from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_flop_count

    def attention(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
        return int(sdpa_flop_count(query.shape, key.shape, value.shape))

    def attention_back(_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
        return 2 * attention(query, key, value)

    def convolution_back(grad: Tensor, x: Tensor, w: Tensor, *rest: Argument, **_: object) -> int:
        # Each gradient takes as many FLOPs as the forward; for a grouped convolution's weights torch counts as if
        # ungrouped.
        transposed, output_mask = rest[4], rest[7]
        pass_flops = conv_flop_count(list(x.shape), list(w.shape), list(grad.shape), transposed=transposed)
        return int(pass_flops) * (int(output_mask[0]) + int(output_mask[1]))

    def recurrent(x: Tensor, w: Tensor, u: Tensor, *_: object, **__: object) -> int:
        return 2 * int(x.shape[0] * x.shape[1]) * int(w.numel() + u.numel())

    def recurrent_back(x: Tensor, w: Tensor, u: Tensor, *_: object, **__: object) -> int:
        return 2 * recurrent(x, w, u)

    def grouped(a: Tensor, b: Tensor, *_: object, **__: object) -> int:
        return 2 * int(a.numel()) * int(b.shape[-1])

    aten, (attend, attend_back) = torch.ops.aten, (flash_attention_on_cpu, flash_attention_on_cpu_backward)
    return flop_registry | {
        attend: attention,
        attend_back: attention_back,
        aten.convolution_backward: convolution_back,
        GROUPED_PRODUCT: grouped,
        aten.mkldnn_rnn_layer: recurrent,
        aten.mkldnn_rnn_layer_backward: recurrent_back,
    }


def is_of_cudnn(func: Operator) -> bool:
    """True for an operation with FLOPs that GPUs compute by cuDNN: a convolution or a recurrent layer."""
    return any(word in func.name() for word in ("conv", "rnn"))


def mixed_dtypes(func: Operator, arguments: object) -> list[str]:
    """Returns the dtypes of a product of several, which fails with real numbers and not without memory; else none."""
    dtypes = sorted({dtype_name(tensor.dtype) for tensor in tensors_of(arguments)})
    # Convolutions fail without memory, too.
    return dtypes if len(dtypes) > 1 and func.overloadpacket.__name__ in _PRODUCTS else []


def check_dtypes(func: Operator, args: Arguments, layer: str, allowed: Collection[str]) -> None:
    """Raises TraceError for a product of two dtypes unless both are `allowed`."""
    dtypes = mixed_dtypes(func, args)
    if not all(dtype in allowed for dtype in dtypes):
        raise TraceError(
            f"{f'`{layer}`' if layer else 'its forward'} multiplies numbers of {' and '.join(dtypes)}",
            remedy="a tensor of the data is given to the network in float32, or int64: let `forward` cast it, as by "
            "`x.double()`; or make the network in float32, which is that of a training",
        )
