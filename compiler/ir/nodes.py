"""Data types of the model as a list of layers.

A `LayerNode` is the unit of placement and of cost: one entry of the job's list with `repeat` unrolled, one block of a
library network, one `residual([...])`. Shapes are of one sample, without the batch; FLOPs and bytes are per sample and
add up over samples. Import these names from `dslc.compiler.model.model`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from dslc.compiler.ir.memory import LayerMemory
from dslc.compiler.ir.parameter_names import ParameterNames
from dslc.compiler.ir.steps import InitStep, ModuleStep
from dslc.compiler.ir.tensors import QuantizedWeight, TensorFact
from dslc.dsl.record import Record, record
from dslc.dsl.source import Span

if TYPE_CHECKING:
    from dslc.compiler.ir.module_facts import ModelFacts


@record
class ParameterNode(Record):
    """A parameter under its name in the unwrapped model. `init` is None if a user's own function initialises it.

    `trains` is the module's own setting; `model.freeze` may override it (`sharding.trained`).
    """

    name: str
    shape: tuple[int, ...]
    init: InitStep | None = None
    tied_to: str | None = None  # the parameter whose tensor it is
    trains: bool = True
    quantized: QuantizedWeight | None = None  # the shape is then its bytes
    experts: int = 0  # the experts whose matrices it stacks along its first dim

    @property
    def element(self) -> int:
        """The bytes of one of its numbers."""
        return 1 if self.quantized else 4

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The shape that files of weights have."""
        return self.quantized.shape if self.quantized else self.shape

    @property
    def first_name(self) -> str:
        """The name that the tensor has first in the network."""
        return self.tied_to or self.name

    @property
    def count(self) -> int:
        """The count of its numbers; 0 if they are another parameter's."""
        return 0 if self.tied_to else prod(self.shape)


@record
class BufferNode(Record):
    """A buffer; `saved` if it is in the state dict."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    saved: bool = True


class ModulePart(NamedTuple):
    """A module in a layer, or the layer itself, that is an attention or has no parts: its input and output, and whether
    that has 16 bits under autocast.
    """

    name: str
    kind: str  # its word in the language
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    takes_low: bool
    gives_low: bool


@record
class LayerNode(Record):
    """One layer: input, output, parameters and costs.

    FLOPs are two for each multiply-add of matrix products, convolutions and attention (full, even if it is causal), as
    in torch's FlopCounterMode; `backward_flops` leaves out the gradient of an input that needs none because no
    parameter comes before it. `masks` are the numbers of the mask that tells, along the context axis, the positions
    that a piece of the sequence sees. `operations` are torch's of a forward pass on CPUs, without views.
    """

    name: str
    kind: str  # its word in the language: conv2d, transformer_block; `python` for a user's own module
    span: Span | None
    input: TensorFact
    output: TensorFact
    parameters: tuple[ParameterNode, ...]
    buffers: tuple[BufferNode, ...]
    forward_flops: int
    backward_flops: int
    float32: LayerMemory
    autocast: LayerMemory  # in bf16 or fp16
    recomputable: bool
    low: bool = False  # under autocast its output has 16 bits
    parts: tuple[ModulePart, ...] = ()  # of a library layer, in the order of their calls
    masks: int = 0
    multiplies: bool = True  # it computes products other than convolutions: on a GPU, by cuBLAS
    operations: int = 0


@record
class ModelGraph(Record):
    """The layers in order, and the constructors of the model.

    `parameters` counts each tied weight once. `batch_norm_values` is the least count of numbers that a batch norm has
    of one sample and channel (1 for vectors): with one sample and one number there is no variance, and torch refuses.
    """

    layers: tuple[LayerNode, ...]
    root: ModuleStep | None  # None for a user's own module
    inits: tuple[InitStep, ...]
    ties: tuple[tuple[str, str], ...]  # (parameter, the parameter whose tensor it is)
    input: TensorFact
    output: TensorFact
    batch_norm: bool
    unsynced_batch_norm: bool
    batch_norm_values: int | None = None
    noise: bool
    parameters: int
    unused: tuple[str, ...] = ()  # parameters that the output does not depend on
    varies: bool = False  # numbers, or a loss of the user's own, decide which parameters a step uses
    reset: bool = False  # too large to be made whole by the function that makes it
    adapted: bool = False  # some layers have adapters (compiler/ir/parameter_names.py)
    traced: ModelFacts | None = None  # tracing's facts of a user's own module
    shared: tuple[LayerNode, ...] = ()  # the layers as on one rank of the tensor axis, if there is one
    shared_output: tuple[int, ...] = ()
    even: tuple[LayerNode, ...] = ()  # `shared` for an even routing of tokens, if the job states another

    @property
    def of_a_rank(self) -> tuple[LayerNode, ...]:
        """The layers as on one rank along the tensor axis."""
        return self.shared or self.layers

    @cached_property
    def equal_layers(self) -> Mapping[int, int]:
        """Maps the `id` of each layer of a rank to the `id` of the first layer with the same shapes and memory."""
        first_layers: dict[tuple[object, ...], int] = {}
        alike = {}
        for layer in self.of_a_rank:
            shapes = tuple((q.shape, q.count) for q in layer.parameters)
            modules = len({q.name.rpartition(".")[0] for q in layer.parameters})
            key = (layer.float32, layer.autocast, layer.input, layer.output, shapes, modules, layer.masks)
            alike[id(layer)] = first_layers.setdefault(key, id(layer))
        return alike

    @property
    def moves_buffers(self) -> bool:
        """True if forward passes may move buffers by their samples, other than batch norm's statistics."""
        if self.traced is None:
            return False
        counted = self.traced.network.counted if self.traced.network is not None else ()
        return any(name not in counted for name in self.traced.changed)

    def layer_of(self, module: str) -> LayerNode | None:
        while module and module not in self._by_name:
            module = module.rpartition(".")[0]
        return self._by_name.get(module)

    @cached_property
    def names(self) -> ParameterNames:
        """The names of the parameters; a tied parameter has several."""
        parameters = [q for layer in self.layers for q in layer.parameters]
        return ParameterNames([q.name for q in parameters], [(q.name, q.tied_to) for q in parameters if q.tied_to])

    @cached_property
    def _by_name(self) -> dict[str, LayerNode]:
        return {layer.name: layer for layer in self.layers if layer.name}

    @property
    def has_quantized_weights(self) -> bool:
        """True if some frozen weights are in 4 or 8 bits."""
        return any(q.quantized for layer in self.layers for q in layer.parameters)

    @property
    def forward_flops(self) -> int:
        return sum(layer.forward_flops for layer in self.layers)

    @property
    def backward_flops(self) -> int:
        return sum(layer.backward_flops for layer in self.layers)
