"""Makes the model that a `ModelStep` describes.

A library model is built on the meta device, which costs no memory, and then given its parameters one by one. Each is
drawn from a generator that the seed and its own name determine: whatever the other parameters, the device or the ranks.
A user's own model is what their function returns under the seed; one of `transformers` is made in the same way.

Contract: the names in the state dict are the plain names of the unwrapped model; every tensor is filled, or an error is
raised. meta_model.py makes a model that is not to be whole on any rank from the same functions.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dslc.compiler.ir.parameter_names import AdapterNames, drawn_name
from dslc.compiler.ir.program import InitStep, ModelStep, ModuleStep
from dslc.compiler.trace.private_torch import own_parameters
from dslc.runtime.model import modules
from dslc.runtime.model.errors import ModelError
from dslc.runtime.model.tensor_names import seed_of
from dslc.runtime.process.job_line import mark_errors
from dslc.runtime.process.user_code import load_function


class _Unfilled(TorchFunctionMode):
    """Skips torch's own initial values, for which `normal_` on the meta device would load the compiler: 0.8 s."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def skeleton(step: ModelStep) -> nn.Module:
    """Returns a library model on the meta device: shapes and names, no numbers. Tied weights are shared already."""
    assert step.root is not None, "a model of a user's own has no skeleton"
    with torch.device("meta"), _Unfilled():
        module = _make(step.root)
    tie(module, step.ties)
    if step.adapter is not None:
        names = AdapterNames(step.adapter.targets, step.adapter.save)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(names.trains(name))
    return module


def initial_value(init: InitStep, seed: int) -> Tensor:
    """Returns the whole parameter, float32 on the CPU: a function of seed, parameter name and `init` alone."""
    generator = torch.Generator().manual_seed(seed_of(seed, drawn_name(init.parameter)))
    value = torch.empty(init.shape, dtype=torch.float32)
    match init.kind:
        case "uniform":
            return value.uniform_(init.a, init.b, generator=generator)
        case "normal":
            return value.normal_(init.a, init.b, generator=generator)
        case "constant":
            return value.fill_(init.a)


def _make(step: ModuleStep) -> nn.Module:
    """Returns the module with its submodules. Raises AssertionError, naming the line, for an unknown class."""
    place, name = (modules, step.kind[1:]) if step.kind.startswith(".") else (nn, step.kind)
    kind = getattr(place, name, None)
    assert inspect.isclass(kind) and issubclass(kind, nn.Module), f"{step.line}: no module {step.kind}"
    with mark_errors(step.line):
        module = kind(**step.arguments)
    for child in step.children:
        module.add_module(child.name, _make(child))
    return module


def _owner(module: nn.Module, parameter: str) -> tuple[nn.Module, str]:
    path, _, name = parameter.rpartition(".")
    return module.get_submodule(path), name


def tie(module: nn.Module, ties: tuple[tuple[str, str], ...]) -> None:
    """Ties parameters of the same shape: each pair is (the name that changes, the name whose tensor it takes)."""
    for parameter, whose in ties:
        owner, name = _owner(module, parameter)
        own_parameters(owner)[name] = module.get_parameter(whose)


def own_model(step: ModelStep) -> nn.Module:
    """Returns the model of the user's function, or of the `transformers` library. It is made under the seed and put
    into training mode (`from_pretrained` returns models in evaluation mode). A submodule that its own `train` keeps in
    evaluation mode stays so.
    """
    if step.transformers is not None:
        from dslc.runtime.model.transformers_model import build_transformers

        with mark_errors(step.transformers.line), under_seed(step.seed), _without_quantized_weights(step):
            user_module = build_transformers(step.transformers)
        return _add_adapter(user_module, step)
    assert step.python is not None
    with mark_errors(step.python.line):
        function = load_function(step.python)
        with under_seed(step.seed):
            module = function()
    if not isinstance(module, nn.Module):
        line_text = f"{step.python.line}: " if step.python.line else ""
        raise ModelError(
            f"{line_text}`{step.python.function}` must return a torch.nn.Module, and returned "
            f"{_article(type(module).__name__)}"
        )
    make_contiguous(module, dense=True)
    return _add_adapter(module.train(), step)


def make_contiguous(module: nn.Module, *, dense: bool = False) -> None:
    """Gives parameters and buffers that are not contiguous memory of their own; with `dense`, only those that leave
    gaps in theirs, or use a place twice. A fused optimizer walks over the memory of a parameter and of its gradient,
    which has no gaps. No broadcast fills a buffer that was expanded.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_contiguous():
            copy_format = torch.empty_like(tensor, memory_format=torch.preserve_format)
            if not dense or copy_format.stride() != tensor.stride():
                tensor.data = tensor.detach().clone(memory_format=torch.contiguous_format)


def _add_adapter(module: nn.Module, step: ModelStep) -> nn.Module:
    if step.adapter is None:
        return module
    from dslc.runtime.model.adapters import add

    if not step.quantized:
        return add(module, step.adapter, step.seed)
    from dslc.runtime.model.quantized_linear import give_memory, quantize_layers

    if torch.get_default_device().type != "meta":
        give_memory(module, step.quantized, step.seed)
    return quantize_layers(add(module, step.adapter, step.seed), step.quantized)


def _without_quantized_weights(step: ModelStep) -> contextlib.AbstractContextManager[None]:
    """Makes a model whose dense layers take no memory, if the job quantizes some."""
    if not step.quantized or torch.get_default_device().type == "meta":
        return contextlib.nullcontext()
    from dslc.runtime.model.quantized_linear import dense_layers_without_memory

    return dense_layers_without_memory()


@contextlib.contextmanager
def under_seed(seed: int) -> Iterator[None]:
    """Seeds the random generators with `seed`, and restores their states afterwards."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # else CUDA would start
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(seed)
        yield


def _article(name: str) -> str:
    return f"an `{name}`" if name[:1] in "aeiouAEIOU" else f"a `{name}`"
