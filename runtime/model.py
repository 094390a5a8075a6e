"""Makes the model that a `ModelStep` describes.

A library model is built on the meta device, which costs no memory, and then given its parameters one by one, each drawn
alone from a generator that the seed and the parameter's own name determine (LANGUAGE.md, invariant 2): the value of a
parameter does not depend on the other parameters, the device or the number of ranks. A user's own model is what their
function returns, called once under the seed.

Contract: the names in the state dict are the plain names of the unwrapped model; every tensor is filled, or it is an
error.
"""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from dslc.compiler.program import InitStep, ModelStep, ModuleStep, PythonFunction
from dslc.runtime import modules
from dslc.runtime.user_code import load_function


class ModelError(RuntimeError):
    """A user's own function did not give a model; the message begins with the place in the job."""


def build_model(step: ModelStep, device: torch.device | str) -> nn.Module:
    """The model on `device`, in float32, in training mode, its tied weights shared.

    Raises ModelError where a user's own function gives no module; what the function raises comes through.
    """
    if step.python is not None:
        module: nn.Module = _users_own(step.python, step.seed).to(device)
        _tie(module, step.ties)
    else:
        module = skeleton(step)
        fill(module, step, device)
    if step.channels_last:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module


class _Unfilled(TorchFunctionMode):
    """Leaves out torch's own initial values. On the meta device they mean nothing, and `normal_` loads torch's compiler
    there, which takes 0.8 s.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def skeleton(step: ModelStep) -> nn.Module:
    """A library model on the meta device: shapes and names, no numbers. Tied weights are shared already."""
    assert step.root is not None, "a model of a user's own has no skeleton"
    with torch.device("meta"), _Unfilled():
        module = _make(step.root)
    _tie(module, step.ties)
    return module


@torch.no_grad()
def fill(module: nn.Module, step: ModelStep, device: torch.device | str) -> None:
    """Puts the initial values into a skeleton, in place, on `device`."""
    for init in step.inits:
        owner, name = _owner(module, init.parameter)
        owner._parameters[name] = nn.Parameter(initial_value(init, step.seed).to(device))
    _tie(module, step.ties)
    for part in module.modules():
        if isinstance(part, _BatchNorm) and part.running_mean is not None and part.running_mean.is_meta:
            for name, buffer in part.named_buffers(recurse=False):
                # Not `empty_like`, which for a meta tensor loads sympy: 0.3 s.
                part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
            part.reset_running_stats()
    named = [*module.named_parameters(), *module.named_buffers()]
    unfilled = [name for name, tensor in named if tensor.is_meta]
    assert not unfilled, f"nothing says what these tensors are to hold: {', '.join(unfilled)}"


def initial_value(init: InitStep, seed: int) -> Tensor:
    """The whole parameter, float32 on the CPU: a function of the seed, the parameter's name and `init` alone."""
    digest = hashlib.sha256(f"{seed}:{init.parameter}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    value = torch.empty(init.shape, dtype=torch.float32)
    match init.kind:
        case "uniform":
            return value.uniform_(init.a, init.b, generator=generator)
        case "normal":
            return value.normal_(init.a, init.b, generator=generator)
        case "constant":
            return value.fill_(init.a)


def _make(step: ModuleStep) -> nn.Module:
    """The module and its parts. Raises AssertionError, naming the line, for a class that is not there."""
    place, name = (modules, step.kind[1:]) if step.kind.startswith(".") else (nn, step.kind)
    kind = getattr(place, name, None)
    assert inspect.isclass(kind) and issubclass(kind, nn.Module), f"{step.line}: no module {step.kind}"
    module = kind(**step.arguments)
    for child in step.children:
        module.add_module(child.name, _make(child))
    return module


def _owner(module: nn.Module, parameter: str) -> tuple[nn.Module, str]:
    path, _, name = parameter.rpartition(".")
    return module.get_submodule(path), name


def _tie(module: nn.Module, ties: tuple[tuple[str, str], ...]) -> None:
    for parameter, whose in ties:
        owner, name = _owner(module, parameter)
        owner._parameters[name] = module.get_parameter(whose)


def _users_own(python: PythonFunction, seed: int) -> nn.Module:
    function = load_function(python)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        module = function()
    if not isinstance(module, nn.Module):
        where = f"{python.line}: " if python.line else ""
        raise ModelError(
            f"{where}`{python.function}` must return a torch.nn.Module, and returned {_article(type(module).__name__)}"
        )
    return module


def _article(name: str) -> str:
    return f"an `{name}`" if name[:1] in "aeiouAEIOU" else f"a `{name}`"
