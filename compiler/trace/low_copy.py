"""Tries a module in 16 bits as the level O2 of a precision runs it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import nn

from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.trace.batch import SMALL, Example, batch_of
from dslc.compiler.trace.fake_tensor_mode import detect_fake_mode
from dslc.compiler.trace.flops import mixed_dtypes
from dslc.compiler.trace.instantiate import TraceError
from dslc.compiler.trace.private_torch import (
    Arguments,
    OperationMode,
    Operator,
    Options,
    tree_map_only,
)
from dslc.compiler.trace.structures import UserValue, call


def try_low_copy(model: nn.Module, input: TensorFact | Example, dtype: str, units: Sequence[str]) -> None:
    """Runs a forward pass as O2 does, of a module that was traced: its parameters have `dtype`, and so have the inputs
    of it and its `units`; buffers stay as they are. Raises TraceError if that fails.
    """

    low, fake = getattr(torch, dtype), detect_fake_mode(list(model.parameters()))
    if fake is None:
        return  # there are no parameters

    def cast(value: UserValue) -> UserValue:
        return tree_map_only(
            torch.Tensor, lambda tensor: tensor.to(low) if tensor.is_floating_point() else tensor, value
        )

    def cast_arguments(
        module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        return cast(args), cast(kwargs)

    with ExitStack() as stack:
        for context in (fake, OperationMode(_run_of_one_dtype), torch.no_grad()):
            stack.enter_context(context)
        for module in (model, *map(model.get_submodule, units)):
            stack.callback(module.register_forward_pre_hook(cast_arguments, with_kwargs=True).remove)
        low_parameters = cast(dict(model.named_parameters()))

        def with_low(*args: object, **kwargs: object) -> object:
            return torch.func.functional_call(model, low_parameters, args, kwargs)

        try:
            call(with_low, model.forward, batch_of(input, SMALL, fake))
        except RuntimeError as error:
            reason = str(error).strip().split("\n")[0]
            raise TraceError(
                f"with its parameters in {dtype} (`level = O2`) its forward fails: {reason}",
                remedy="`level = O1`, which leaves the parameters in float32; or cast in its forward what stays so",
            ) from error


def _run_of_one_dtype(func: Operator, args: Arguments, kwargs: Options) -> object:
    """Raises for products of two dtypes, which fail with real numbers; without memory torch accepts them."""
    if dtypes := mixed_dtypes(func, (args, kwargs)):
        raise RuntimeError(f"`{func.overloadpacket.__name__}` takes one dtype, and is given {' and '.join(dtypes)}")
    return func(*args, **kwargs)
