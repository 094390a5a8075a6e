"""Tries a module in 16 bits as the level O2 of a precision runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.trace.batch import SMALL, Example, batch_of
from dslc.compiler.trace.flops import PRODUCTS
from dslc.compiler.trace.instantiate import TraceError
from dslc.compiler.trace.run import tensors_of

if TYPE_CHECKING:
    from torch import nn

    from dslc.compiler.trace.private_torch import Operator


def try_low_copy(model: nn.Module, input: TensorFact | Example, dtype: str, units: Sequence[str]) -> None:
    """Runs a forward pass as O2 does, of a module that was traced: its parameters have `dtype`, and so have the inputs
    of it and its `units`; buffers stay as they are. Raises TraceError if that fails.
    """
    import torch

    from dslc.compiler.trace.private_torch import TorchDispatchMode, detect_fake_mode, tree_map_only
    from dslc.compiler.trace.structures import call

    class OneDtype(TorchDispatchMode):
        """Raises for products of two dtypes, which fail with real numbers; without memory torch accepts them."""

        def __torch_dispatch__(
            self,
            func: Operator,
            types: Sequence[type],
            args: tuple[object, ...] = (),
            kwargs: Mapping[str, object] | None = None,
        ) -> object:
            dtypes = sorted({str(tensor.dtype) for tensor in tensors_of((args, kwargs))})
            if len(dtypes) > 1 and func.overloadpacket.__name__ in PRODUCTS:
                raise RuntimeError(
                    f"`{func.overloadpacket.__name__}` takes one dtype, and is given {' and '.join(dtypes)}"
                )
            return func(*args, **(kwargs or {}))

    low, fake = getattr(torch, dtype), detect_fake_mode(list(model.parameters()))

    def cast(value: Any) -> Any:
        return tree_map_only(
            torch.Tensor, lambda tensor: tensor.to(low) if tensor.is_floating_point() else tensor, value
        )

    def cast_arguments(module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
        return cast(args), cast(kwargs)

    if fake is None:
        return  # there are no parameters
    with ExitStack() as around:
        around.enter_context(fake)
        around.enter_context(OneDtype())  # type: ignore[no-untyped-call]
        around.enter_context(torch.no_grad())
        for module in (model, *map(model.get_submodule, units)):
            around.callback(module.register_forward_pre_hook(cast_arguments, with_kwargs=True).remove)
        low_parameters = cast(dict(model.named_parameters()))
        sample = batch_of(input, SMALL, fake)

        def with_low(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(model, low_parameters, args, kwargs)

        try:
            call(with_low, model.forward, sample)
        except RuntimeError as error:
            reason = str(error).strip().split("\n")[0]
            raise TraceError(
                f"with its parameters in {dtype} (`level = O2`) its forward fails: {reason}",
                remedy="`level = O1`, which leaves the parameters in float32; or cast in its forward what stays so",
            ) from error
