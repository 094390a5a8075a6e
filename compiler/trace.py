"""What a user's own functions make, found by calling them once: models on the meta device, data sets for one sample.

The only place of this floor where torch is imported, and the only one that runs a user's code. `check` comes here with
`--trace` alone. A model sees a batch of two samples (one would stop batch norm), so its figures are halved.

Limits: what is traced is one path through the module; control flow that depends on data may take others in training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dslc.compiler.facts import DType, ModelFacts, SourceFacts, TensorFact

if TYPE_CHECKING:
    import torch

BATCH = 2


class TraceError(Exception):
    """A user's function that cannot be used, in one line. The exception behind it is its `__cause__`."""


def trace_source(make: Callable[[], Any]) -> SourceFacts:
    """What `make()` gives: a map-style data set, or a pair (train, validation). Samples are pairs (input, target)."""
    made = make()
    if isinstance(made, tuple) and len(made) == 2 and all(hasattr(part, "shape") for part in made):
        made = list(zip(*made, strict=True))  # a pair of arrays is one data set
    train, validation = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not hasattr(train, "__len__") or not hasattr(train, "__getitem__"):
        raise TraceError(f"a data set has `len` and indexing, and `{type(train).__name__}` lacks them")
    if len(train) == 0:
        raise TraceError("the data set is empty")
    sample = train[0]
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise TraceError(f"a sample is a pair (input, target), and the first one is a `{type(sample).__name__}`")
    return SourceFacts(
        samples=len(train),
        validation_samples=None if validation is None else len(validation),
        input=_fact(sample[0], "input"),
        target=_fact(sample[1], "target"),
    )


def _fact(value: Any, what: str) -> TensorFact:
    import torch

    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TraceError(f"the {what} of a sample is a `{type(value).__name__}`, which is no tensor") from error
    return TensorFact(shape=tuple(tensor.shape), dtype=_seen(tensor.dtype))


def _seen(dtype: torch.dtype) -> DType:
    """The dtype in which the model sees numbers of this one: whole numbers as int64, others as float32."""
    return "float32" if dtype.is_floating_point else "int64"


def trace_model(make: Callable[[], Any], input: TensorFact) -> ModelFacts:
    """Parameters, cost and output of the module that `make()` gives, for a sample `input`."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    model = _on_meta(make)
    if not isinstance(model, torch.nn.Module):
        raise TraceError(f"it returns a `{type(model).__name__}`, not a `torch.nn.Module`")
    dtype = getattr(torch, input.dtype)
    batch = torch.empty((BATCH, *input.shape), dtype=dtype, device="meta")
    saved: dict[int, int] = {}
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers(), batch)}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in own:
            saved[id(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        kept.append(tensor)  # so that no storage is freed and its identity used again
        return tensor

    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with FlopCounterMode(display=False) as forward:
            output = model(batch)
        if not isinstance(output, torch.Tensor):
            raise TraceError(f"its forward returns a `{type(output).__name__}`, not a tensor")
        if output.shape[:1] != (BATCH,):
            raise TraceError(f"{BATCH} samples go in, and the output's shape is {tuple(output.shape)}")
        with FlopCounterMode(display=False) as backward:
            if output.requires_grad:
                output.sum().backward()
    return ModelFacts(
        parameters=tuple((name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()),
        buffers=tuple((name, tuple(b.shape), str(b.dtype).removeprefix("torch.")) for name, b in model.named_buffers()),
        output=TensorFact(shape=tuple(output.shape[1:]), dtype=_seen(output.dtype)),
        batch_norm=any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in model.modules()),
        noise=any(isinstance(m, torch.nn.modules.dropout._DropoutNd) and m.p > 0 for m in model.modules()),
        unused=tuple(name for name, p in model.named_parameters() if p.requires_grad and p.grad is None),
        forward_flops=forward.get_total_flops() // BATCH,
        backward_flops=backward.get_total_flops() // BATCH,
        saved_bytes=sum(saved.values()) // BATCH,
    )


def _on_meta(make: Callable[[], Any]) -> Any:
    """The module on the meta device; a function that cannot build there builds on the CPU and is moved."""
    import torch

    try:
        with torch.device("meta"):
            return make()
    except (NotImplementedError, RuntimeError, ValueError, TypeError):
        made = make()
        return made.to("meta") if isinstance(made, torch.nn.Module) else made
