"""Makes a user's module without memory, and tells its tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import nn

from dslc.compiler.ir.memory import LayerMemory
from dslc.compiler.ir.module_facts import LayerFacts, ModelFacts
from dslc.compiler.ir.parameter_names import ParameterNames
from dslc.compiler.ir.tensors import UNSAVABLE, TensorFact
from dslc.compiler.trace.compiler_stand_in import leave_out_compiler
from dslc.compiler.trace.fake_tensor_mode import FakeTensorMode
from dslc.compiler.trace.private_torch import (
    MODULE_MAPPINGS,
    REFERENCES,
    own_buffers,
    own_parameters,
    storage_identity,
)

NOTHING = LayerMemory(saved=0, selective=0)


def mode_without_memory() -> FakeTensorMode:
    """Returns a new mode that makes tensors without memory. A process that has not imported torch's compiler gets a
    stand-in for it, which stays.
    """
    leave_out_compiler(REFERENCES)
    # Tensors of a module besides its parameters and buffers may be real.
    return FakeTensorMode(allow_non_fake_inputs=True)


class TraceError(Exception):
    """A user's function that cannot be used, in one line. The exception behind it is its `__cause__`; `remedy` says
    what to do, if that is known.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


def facts_of_made(make: Callable[[], object]) -> ModelFacts:
    """Returns the facts of a module that is made, without memory, and not called: its tensors, in one layer. Raises
    TraceError if that fails.
    """

    return facts_of_tensors(made_without_memory(make, mode_without_memory()))


def facts_of_tensors(model: nn.Module) -> ModelFacts:
    """Returns the facts of a module that is not called: all of its tensors are in one layer."""
    saved = model.state_dict(keep_vars=True).keys()
    layer = LayerFacts(
        name="",
        kind=type(model).__name__,
        block=False,
        parameters=tuple(name for name, _ in model.named_parameters(remove_duplicate=False)),
        buffers=tuple(name for name, _ in model.named_buffers()),
        input=None,
        output=None,
        forward_flops=0,
        backward_flops=0,
        float32=NOTHING,
        autocast=NOTHING,
    )
    return ModelFacts(
        parameters=tuple((name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()),
        buffers=tuple((name, tuple(b.shape), dtype_name(b.dtype)) for name, b in model.named_buffers()),
        unsaved=tuple(name for name, _ in model.named_buffers() if name not in saved),
        ties=_ties(model),
        embeddings=_embeddings(model),
        dense=_dense_layers(model),
        layers=(layer,),
        output=TensorFact(shape=(), dtype="float32"),
        structured=True,
        batch_norm=False,
        noise=False,
        unused=(),
    )


def _embeddings(model: nn.Module) -> tuple[str, ...]:
    weights = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    return tuple(name for name, parameter in model.named_parameters() if id(parameter) in weights)


def _dense_layers(model: nn.Module) -> tuple[tuple[str, tuple[int, int]], ...]:
    return tuple(
        (name, (module.out_features, module.in_features))
        for name, module in model.named_modules()
        if type(module) is nn.Linear and "forward" not in vars(module)
    )


@contextmanager
def frozen_parameters(model: nn.Module, patterns: tuple[str, ...]) -> Iterator[bool]:
    """Freezes each parameter if a pattern matches any of its names; yields whether some have trained."""
    ties = _ties(model) if patterns else ()
    names = ParameterNames([name for name, _ in model.named_parameters()], ties).matching(patterns)
    parameters = [p for name, p in model.named_parameters() if name in names and p.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield bool(parameters)
    finally:
        for parameter in parameters:
            parameter.requires_grad_()


def made_without_memory(make: Callable[[], object], fake: FakeTensorMode) -> nn.Module:
    """Returns the module without memory. A module that cannot be built so is built on the CPU and emptied."""

    with fake:
        try:
            user_object = make()
        except (RuntimeError, TypeError, ValueError, AssertionError):  # raised for tensors without numbers
            user_object = None
        if fake.quantized:
            user_object = None
    module = as_module(make() if user_object is None else user_object)
    _empty(module, fake)
    return module


def _check_layouts(module: nn.Module) -> None:
    """Raises TraceError for a tensor that is no array of numbers: ranks could neither share it out nor save it."""

    for path, part in module.named_modules():
        attributes = {name: value for name, value in vars(part).items() if name not in MODULE_MAPPINGS}
        registered = dict(part.named_parameters(recurse=False)) | dict(part.named_buffers(recurse=False))
        for name, tensor in (attributes | registered).items():
            if not isinstance(tensor, torch.Tensor) or (layout := _layout(tensor)) is None:
                continue
            path_of_value, (kind, remedy) = f"{path}.{name}" if path else name, layout
            raise TraceError(
                f"`{path_of_value}` ({type(part).__name__}) is {kind}, and dslc takes tensors that are plain "
                "arrays of numbers",
                remedy=remedy,
            )


def _layout(tensor: torch.Tensor) -> tuple[str, str] | None:
    """For a tensor that is no array, returns its kind, and what to keep in its place; None for an array."""
    if tensor.is_quantized:
        return "a quantized tensor", "keep it as `dequantize()` gives it; or its `int_repr()`, scale and zero point"
    if tensor.is_nested:
        return "a nested tensor", "keep a padded one and its lengths"
    if tensor.is_mkldnn:
        return "a tensor in the layout of mkldnn", "keep it as `to_dense()` gives it"
    layout = str(tensor.layout).removeprefix("torch.")
    if layout == "strided":
        return None
    remedy = "keep a dense one; or buffers of its indices and values, of which `forward` makes a sparse tensor"
    return f"a sparse tensor (`{layout}`)", remedy


def as_module(user_object: object) -> nn.Module:
    """Returns it in training mode, as in the step that is traced."""

    if not isinstance(user_object, torch.nn.Module):
        raise TraceError(f"it returns a `{type(user_object).__name__}`, not a `torch.nn.Module`")
    _check_layouts(user_object)
    _check_memory(user_object)
    _check_dtypes(user_object)
    return user_object.train()


def _check_dtypes(model: nn.Module) -> None:
    """Raises TraceError for a tensor of the state dict that the files of weights cannot hold."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if (dtype := dtype_name(tensor.dtype)) in UNSAVABLE:
            raise TraceError(
                f"its `{name}` is of {dtype}, for which files of weights have no name",
                "`complex64`, `float32`; or `register_buffer(…, persistent = False)` for what `__init__` computes",
            )


def _check_memory(model: nn.Module) -> None:
    """Raises TraceError for a parameter without a shape, and for elements that lie at one place in memory."""

    ranges: dict[int, list[tuple[int, int, str]]] = defaultdict(list)  # by memory: first place, end, name
    for name, parameter in model.named_parameters():
        if isinstance(parameter, torch.nn.UninitializedParameter):
            raise TraceError(
                f"its parameter `{name}` has no shape before a first forward pass",
                "call it once on a sample in the function that makes it, or give its layer the number of inputs",
            )
        steps = zip(parameter.shape, parameter.stride(), strict=True)
        extent = 1 + sum((size - 1) * int(stride) for size, stride in steps)
        if extent < parameter.numel():
            raise TraceError(
                f"several elements of its parameter `{name}` lie at one place in memory, as `expand` leaves them: no "
                "optimizer can update them",
                "make a parameter of what is expanded, and call `expand` in `forward`; or `clone()` it",
            )
        if extent == parameter.numel():
            start = int(parameter.storage_offset())
            ranges[storage_identity(parameter)].append((start, start + extent, name))
    for shared in ranges.values():
        for (_, end, one), (start, _, following) in pairwise(sorted(shared)):
            if start < end:
                raise TraceError(
                    f"its parameters `{one}` and `{following}` overlap in memory",
                    "`clone()` each; or make one parameter, and take views of it in `forward`",
                )


def _empty(model: nn.Module, fake: FakeTensorMode) -> None:
    """Replaces real tensors, and those on other devices, by tensors of the fake CPU; tied ones stay tied."""

    def emptied(tensor: torch.Tensor) -> torch.Tensor:
        if getattr(tensor, "fake_mode", None) is fake and tensor.device.type == "cpu":
            return tensor
        with fake:
            return torch.empty(tensor.shape, dtype=tensor.dtype)

    replace_tensors(model, emptied)


def replace_tensors(model: nn.Module, replace: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replaces parameters and buffers by what `replace` returns of each; tied ones stay tied."""

    tensors: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for own_tensors in (own_parameters(module), own_buffers(module)):
            for name, tensor in own_tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in tensors:
                    new = replace(tensor)
                    if new is not tensor and own_tensors is own_parameters(module):
                        new = torch.nn.Parameter(new, tensor.requires_grad)
                    tensors[id(tensor)] = new
                own_tensors[name] = tensors[id(tensor)]  # type: ignore[assignment]


def _ties(model: nn.Module) -> tuple[tuple[str, str], ...]:
    first_path: dict[int, str] = {}
    named = list(model.named_parameters(remove_duplicate=False))
    return tuple((name, first_path[id(p)]) for name, p in named if first_path.setdefault(id(p), name) != name)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
