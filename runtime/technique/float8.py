"""Dense layers that multiply in 8 bits, by torchao's `Float8Linear`, in the place of the layers that the program names.

Model: each factor of a product is scaled so that its largest number, or each row's, is the largest of the 8-bit
format, then rounded. Scales follow from the numbers at hand (dynamic scaling), so a rank scales its own micro-batch.
The result, bias and all other operations have the dtype of autocast. Parameters and the optimizer stay in float32.

Contract: layers, losses and gradients equal those of `torchao.float8.convert_to_float8_training` under autocast. On a
CPU torchao does not ask autocast for its dtype; a layer here casts its input, as torchao does on a GPU.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dslc.compiler.ir.steps import Float8Step, PrecisionStep
from dslc.runtime.model.errors import ModelError

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

LEAST_CAPABILITY = (8, 9)  # of NVIDIA's GPUs with products in 8 bits


class Float8DeviceError(ModelError):
    """The device has no products in 8 bits."""


def apply(step: PrecisionStep, model: nn.Module, device: torch.device) -> None:
    """Puts torchao's layers into the places of the layers of the step; a part of a model may lack some of them. Raises
    Float8DeviceError.
    """
    if step.float8 is None or not step.float8.layers:
        return
    if not step.float8.emulated:
        check_device(device)
    preload()
    for name in step.float8.layers:
        layer = layer_of(model, name)
        if layer is not None:
            _convert(layer, step.float8)


def layer_of(model: nn.Module, name: str) -> nn.Module | None:
    """Returns a layer; None for a part of a model that lacks it."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _convert(layer: nn.Module, step: Float8Step) -> None:
    """Makes a layer torchao's, in place: other modules, hooks and initial values refer to the object."""
    from torchao.float8 import convert_to_float8_training

    assert type(layer) is nn.Linear, "the compiler admits a dense layer alone"
    converted = convert_to_float8_training(nn.Sequential(layer), config=configuration(step))[0]
    layer.__class__ = type(converted)
    vars(layer).update({name: value for name, value in vars(converted).items() if name not in vars(layer)})
    layer.register_forward_pre_hook(_cast_input, with_kwargs=True)


def preload() -> None:
    """Imports the library, in the process from which ranks are forked. It warns of kernels that it does not need."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import torchao.float8  # noqa: F401


def configuration(step: Float8Step) -> Float8LinearConfig:
    """Returns torchao's configuration. Real products need multiples of 16 rows, which it pads."""
    from torchao.float8 import Float8LinearConfig

    config = Float8LinearConfig.from_recipe_name(step.recipe)
    return replace(config, emulate=step.emulated, pad_inner_dim=not step.emulated)


def check_device(device: torch.device) -> None:
    """Raises Float8DeviceError for a device without products in 8 bits."""
    if device.type == "cuda" and (torch.version.hip or torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY):
        return
    raise Float8DeviceError(
        f"the device {device} has no products in 8 bits: `precision = fp8(emulate = true)` computes the same numbers, "
        "more slowly, and `bf16` needs none"
    )


def _cast_input(
    module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
) -> tuple[tuple[Tensor], dict[str, Tensor]]:
    """Casts a layer's input, which may be given by name, to the dtype of autocast."""
    (input,) = *args, *kwargs.values()
    if torch.is_autocast_enabled(input.device.type):
        input = input.to(torch.get_autocast_dtype(input.device.type))
    return (input,), {}
