"""Finds tensors on the CPU that a network or a loss combines with tensors on a GPU; it needs no GPU.

Model: parameters, buffers and batches lie on `cpu:0`, and what code makes without naming a device on `cpu`. To torch's
fake tensors these are two devices, with the rules of a GPU and the CPU: a number without dimensions and indices may be
on the CPU. Every kernel is a kernel that a machine without a GPU has.

Limits: what follows a number read out of a tensor is not looked at. A device that code names counts as the GPU, also
`cpu`, which `"cuda" if torch.cuda.is_available() else "cpu"` gives here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from traceback import walk_tb
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dslc.compiler.ir.network_facts import CodePlace
from dslc.compiler.trace.batch import SMALL, Example, batch_of
from dslc.compiler.trace.code_place import names_of, place_of
from dslc.compiler.trace.fake_tensor_mode import FakeTensorMode
from dslc.compiler.trace.instantiate import mode_without_memory, replace_tensors
from dslc.compiler.trace.private_torch import (
    Arguments,
    FakeTensorDeviceMismatchError,
    OperationMode,
    Operator,
    Options,
    own_buffers,
    own_parameters,
)
from dslc.compiler.trace.structures import call, map_tensors

if TYPE_CHECKING:
    from dslc.compiler.ir.tensors import TensorFact
    from dslc.dsl.language.job import JobSpec


class NamedDevices(TorchFunctionMode):
    """Gives code that names a GPU the device `instead`; with `cpu`, code that names the CPU as well."""

    def __init__(self, instead: torch.device, *, cpu: bool = False) -> None:
        super().__init__()
        self._instead, self._named = instead, ("cuda", "cpu") if cpu else ("cuda",)

    def __torch_function__(
        self, func: Callable[..., object], types: Sequence[type], args: Arguments = (), kwargs: Options | None = None
    ) -> object:
        arguments = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0].to(self._instead)
        if arguments.get("device") is not None:
            arguments["device"] = self._device(arguments["device"])
        if func is Tensor.to:
            args = tuple(
                self._device(argument) if isinstance(argument, str | torch.device) else argument for argument in args
            )
        return func(*args, **arguments)

    def _device(self, name: str | int | torch.device) -> torch.device:
        device = torch.device("cuda", name) if isinstance(name, int) else torch.device(name)
        return self._instead if device.type in self._named else device


def named_gpus(job: JobSpec) -> AbstractContextManager[object]:
    """Returns the context in which code of a job on GPUs that names a GPU gets the CPU."""

    return nullcontext() if job.devices.gpus is None else NamedDevices(torch.device("cpu"))


def cpu_tensor_of_network(model: nn.Module, input: TensorFact | Example) -> CodePlace | None:
    """Returns the place where the forward pass of `model` combines a tensor on the CPU with tensors on a GPU. None if
    it never does, or if the place cannot be seen.
    """

    fake = mode_without_memory()
    batch = map_tensors(lambda tensor: _on_gpu(tensor, fake), batch_of(input, SMALL, fake))
    with _replaced_tensors(model, lambda tensor: _on_gpu(tensor, fake)):
        return _find_mismatch(lambda: call(model, model.forward, batch), fake, model)


def cpu_tensor_of_loss(loss: Callable[..., object], output: object, target: object) -> CodePlace | None:
    """Returns the place where `loss` does; it is called with GPU copies of an output and a target on the CPU."""

    fake = mode_without_memory()
    pair = [map_tensors(lambda tensor: _on_gpu(tensor, fake), structure) for structure in (output, target)]
    return _find_mismatch(lambda: loss(*pair), fake, torch.nn.Identity())


def _on_gpu(tensor: torch.Tensor, fake: FakeTensorMode) -> torch.Tensor:
    with fake:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu:0")


def _find_mismatch(work: Callable[[], object], fake: FakeTensorMode, model: nn.Module) -> CodePlace | None:
    try:
        with torch.no_grad(), NamedDevices(torch.device("cpu:0"), cpu=True), fake, OperationMode(_run_operation):
            work()
    except FakeTensorDeviceMismatchError as error:
        *_, (innermost, _) = walk_tb(error.__traceback__)
        return place_of(innermost, names_of(model), model)
    except Exception:  # any kind: a number was asked for, or it fails, as the tracing and the trial tell
        return None
    return None


def _run_operation(func: Operator, args: Arguments, kwargs: Options) -> object:
    if func.name() == "aten::_pack_padded_sequence" and args[1].device.index == 0:  # its kernel reads them on the CPU
        raise FakeTensorDeviceMismatchError(func, args[0].device, args[1].device)
    return func(*args, **kwargs)


@contextmanager
def _replaced_tensors(model: nn.Module, replace: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Replaces the parameters and buffers of a module while the context lasts; tied ones stay tied."""

    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(own_parameters(module).update, dict(own_parameters(module)))
            stack.callback(own_buffers(module).update, dict(own_buffers(module)))
        replace_tensors(model, replace)
        yield
