"""Stages of a pipeline as modules: the layers of one, and how they are called.

Contract: tensors that are sent have the dtypes of the program, are contiguous, and have a gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dslc.compiler.ir.program import StageStep
from dslc.compiler.trace.private_torch import is_view
from dslc.compiler.trace.structures import Structure
from dslc.runtime.model.meta_model import Spot
from dslc.runtime.pipeline.recording import Call, ModuleTensor, filled, tensors_of
from dslc.runtime.technique import sample_pass
from dslc.runtime.technique.sample_pass import DrawingLayer

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

    from dslc.runtime.pipeline.captured import Code

Contexts = Callable[[], contextlib.AbstractContextManager[object]]


def enter_passes(stage: PipelineStage, enter: Callable[[int], None], enter_backward: Callable[[], None]) -> None:
    """Lets torch's stage call `enter` with a micro-batch before its forward, `enter_backward` before a backward."""

    def forward_entered(number: int, *args: Any, **kwargs: Any) -> object:
        enter(number)
        return type(stage).forward_one_chunk(stage, number, *args, **kwargs)

    def backward_entered(*args: Any, **kwargs: Any) -> object:
        enter_backward()
        return type(stage).backward_one_chunk(stage, *args, **kwargs)

    stage.forward_one_chunk = forward_entered  # type: ignore[method-assign, assignment]
    stage.backward_one_chunk = backward_entered  # type: ignore[method-assign]


class StageModule(nn.Module):
    """Layers, one after another, within `contexts`. `trains_before`: a stage before trains, and is sent gradients."""

    def __init__(
        self,
        step: StageStep,
        is_last: bool,
        layers: Iterable[nn.Module],
        contexts: Contexts,
        trains_before: bool = True,
    ) -> None:
        super().__init__()
        self.step, self.last, self._around, self._trains_before = step, is_last, contexts, trains_before
        self._sent = getattr(torch, step.outputs[0][1])
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            (x,) = _Dense.apply(x) if self._trains_before else (x.detach(),)  # type: ignore[no-untyped-call]
        with self._around():
            for layer in self.layers:
                x = layer(x)
        return x if self.last else _ready(x, self._sent)


@dataclass(kw_only=True)
class CapturedPart:
    """The code of a stage of a user's module, and the places of tensors outside of layers, some of them in `holder`."""

    codes: Mapping[bool, Code]
    holder: nn.Module = field(default_factory=nn.Module)
    places: dict[ModuleTensor, Spot] = field(default_factory=dict)


class CapturedStage(nn.Module):
    """A part of a user's own module. `full_module` is the module, whose `training` chooses the code to run."""

    def __init__(
        self,
        step: StageStep,
        is_last: bool,
        layers: Mapping[str, nn.Module],
        part: CapturedPart,
        full_module: nn.Module,
        contexts: Contexts,
        device: torch.device,
        trains_before: bool = True,
    ) -> None:
        super().__init__()
        self.step, self.last, self._around, self._device = step, is_last, contexts, device
        self._trains_before = trains_before
        self.layers, self.holder = nn.ModuleList(layers.values()), part.holder
        self._named, self._places, self._codes = dict(layers), dict(part.places), dict(part.codes)
        self._whole = [full_module]  # in a list, so that it is no submodule of the stage
        self._sent = [getattr(torch, dtype) for _, dtype in step.outputs]
        self._first_draws = {mode: first_draws(code.calls) for mode, code in part.codes.items()}
        if any(self._first_draws.values()):
            sample_pass.mark_by_sample(self)
            # Outside of `forward`, which may be compiled.
            self.register_forward_pre_hook(
                lambda stage, _: sample_pass.begin_at(self._first_draws[self._whole[0].training])
            )

    def forward(self, *inputs: Tensor, input: tuple[Tensor, ...] = ()) -> Tensor | tuple[Tensor, ...]:
        code = self._codes[self._whole[0].training]
        values: dict[int, Tensor] = {}
        if code.receives:
            if not self._trains_before:
                inputs = tuple(tensor.detach() for tensor in inputs)
            elif any(tensor.requires_grad for tensor in inputs):
                inputs = _Dense.apply(*inputs)  # type: ignore[no-untyped-call]
            values.update(zip(code.receives, inputs, strict=True))
        else:
            input = inputs
        values.update(enumerate(input))
        samples = len(inputs[0])
        with self._around():
            for call, dropped_numbers in zip(code.calls, code.drops, strict=True):
                self._do(call, values, samples)
                for number in dropped_numbers:
                    values.pop(number, None)
        if self.last:
            outputs = tuple(values[number] for number in code.gives)
            return outputs[0] if code.result.is_tensor else outputs
        return tuple(
            _ready(values[number], dtype, is_used=number in code.used)
            for number, dtype in zip(code.gives, self._sent, strict=True)
        )

    def restored(self, output: Structure, samples: int) -> Structure:
        """Returns the output of the last stage in the form in which the model gives it."""
        code = self._codes[self._whole[0].training]
        if code.result.is_tensor:
            return output
        return code.result.restored(dict(zip(code.gives, output, strict=True)), samples)

    def _do(self, call: Call, values: dict[int, Tensor], samples: int) -> None:
        args = filled(call.args, values, self._places, samples, self._device)
        kwargs = filled(call.kwargs, values, self._places, samples, self._device)
        target = self._named[call.what] if call.layer else call.what
        with contextlib.ExitStack() as contexts:
            if not call.grad:
                contexts.enter_context(torch.no_grad())
            if call.cast is not None:
                is_enabled, dtype = call.cast
                contexts.enter_context(torch.autocast(self._device.type, dtype=dtype, enabled=is_enabled))
            contexts.enter_context(sample_pass.in_layer(call.drawing, call.drawn))
            result = target(*args, **kwargs)
        results = tensors_of(result)
        assert len(results) == len(call.gives), (
            f"{call.where}: {len(results)} tensors, and there were {len(call.gives)}"
        )
        values.update(zip(call.gives, results, strict=True))


def first_draws(calls: Iterable[Call]) -> dict[DrawingLayer, int]:
    """Returns the number of each layer's first draw in some calls."""
    numbers: dict[DrawingLayer, int] = {}
    for call in calls:
        if call.drawing is not None:
            numbers.setdefault(call.drawing, call.drawn)
    return numbers


def _ready(tensor: Tensor, dtype: torch.dtype, is_used: bool = False) -> Tensor:
    """Prepares a tensor to be sent to another stage; `is_used`: this stage works with it, too."""
    tensor = tensor.to(dtype).contiguous()
    if torch.is_grad_enabled() and (is_used or is_view(tensor)):
        # A split backward pass detaches it in place, which torch refuses for views and for tensors it needs again.
        tensor = tensor.clone()
    if torch.is_grad_enabled() and not tensor.requires_grad:
        tensor.requires_grad_()  # nothing here trains, but torch's runtime runs a backward pass all the same
    return tensor


class _Dense(torch.autograd.Function):
    """Returns the same tensors and makes their gradients contiguous, as only such can be sent."""

    @staticmethod
    def forward(ctx: object, *tensors: Tensor) -> object:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> object:
        return tuple(gradient.contiguous() for gradient in gradients)
