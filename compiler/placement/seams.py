"""The tensors that one stage of a pipeline sends to the next, and the layers with which none can end."""

from __future__ import annotations

from dataclasses import replace

from dslc.compiler.ir.nodes import ModelGraph
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.placement.sharding import low_copy, low_dtype
from dslc.dsl.language.job import JobSpec


def boundary_tensors(job: JobSpec, model: ModelGraph, last: int) -> tuple[TensorFact, ...]:
    """Returns the tensors that a stage ending with layer `last` sends for one sample, in the dtypes in which they are
    made.
    """
    if model.traced is not None:
        return model.traced.seams[last].sent
    layer = model.layers[last]
    made = layer.output
    if made.dtype != "float32" or not (layer.low or low_copy(job)):
        return (made,)
    return (replace(made, dtype=low_dtype(job)),)


def unsendable(model: ModelGraph, last: int) -> str:
    """Returns the reason why no stage can end with layer `last`, which is not the model's last; "" if one can."""
    if model.traced is not None:
        return model.traced.seams[last].refused
    return "" if model.layers[last].output.dtype == "float32" else "what it sends are tokens, which have no gradient"
