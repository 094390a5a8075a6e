"""Products in 8 bits with a cut weight round to the numbers of one process, whichever way the weight is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.gang import gang
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dslc.compiler.ir.steps import Float8Step, PrecisionStep
from dslc.runtime.technique import float8

ROWS, INPUTS, OUTPUTS, RANKS = 24, 64, 96, 2


def train_once(recipe: str, cut: int | None) -> dict[str, Tensor]:
    """Returns the output of a layer under autocast, and the gradients; of a share of the weight if it is cut."""
    torch.manual_seed(1)
    layer, input = nn.Linear(INPUTS, OUTPUTS), torch.randn(2, ROWS // 2, INPUTS)
    # A rank's numbers have another size than another's, and count as much in the sums. Scales of rows are powers of
    # two, so that another scale shows by the numbers that are too small for it.
    span = 1 if recipe == "tensorwise" else 3
    of_inputs, of_outputs = torch.logspace(-span, span, INPUTS), torch.logspace(-span, span, OUTPUTS)
    with torch.no_grad():
        layer.weight /= of_outputs[:, None] * of_inputs
    input, gradient = input * of_inputs, torch.randn(2, ROWS // 2, OUTPUTS) * of_outputs
    input.requires_grad_(True)
    model = nn.Sequential(layer)
    step = Float8Step(recipe=recipe, emulated=True, layers=("0",))  # type: ignore[arg-type]
    float8.apply(PrecisionStep(dtype="bfloat16", float8=step), model, torch.device("cpu"))
    given = input
    if cut is not None:
        from dslc.runtime.parallel import float8_tensor_parallel

        axis = init_device_mesh("cpu", (RANKS,))
        style = ColwiseParallel(output_layouts=None) if cut == 0 else RowwiseParallel()
        parallelize_module(layer, axis, style, src_data_rank=None)
        float8_tensor_parallel.cut(layer, cut, axis)
        share = axis.get_local_rank()
        if cut == 0:
            gradient = gradient.chunk(RANKS, -1)[share]
        else:
            given = input.chunk(RANKS, -1)[share]
    with torch.autocast("cpu", torch.bfloat16):
        output = model(given)
    output.backward(gradient.to(output.dtype))
    gradients: Any = {f"gradient of {name}": parameter.grad for name, parameter in model[0].named_parameters()}
    named = gradients | {"output": output.detach(), "gradient of input": input.grad}
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in named.items()}


def of_rank(rank: int, recipe: str, cut: int) -> dict[str, np.ndarray[Any, Any]]:
    return {name: value.float().numpy() for name, value in train_once(recipe, cut).items()}


@pytest.mark.parametrize("cut", [pytest.param(0, id="column"), pytest.param(1, id="row")])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_cut_product_as_in_one_process(recipe: str, cut: int) -> None:
    """Sums over ranks are rounded to 16 bits once more; all else differs by the order of float32 sums alone."""
    alone = {name: value.float().numpy() for name, value in train_once(recipe, None).items()}
    summed = "gradient of input" if cut == 0 else "output"
    for rank, shares in enumerate(gang(RANKS, of_rank, recipe, cut)):
        for name, value in alone.items():
            expected = value
            if cut == 0 and name == "output":
                expected = np.split(value, RANKS, -1)[rank]
            elif cut == 1 and name == "gradient of input":
                # Each rank has the gradient of its share of the features.
                half = INPUTS // RANKS
                expected = np.where(np.arange(INPUTS) // half == rank, value, 0)
            limit = 2**-6 if name == summed else 2**-8
            error = np.abs(shares[name] - expected).max() / np.abs(expected).max()
            assert error <= limit, (name, error)
