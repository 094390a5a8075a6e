"""Runs a model on shapes instead of numbers, and records its layers.

Layer functions (layers.py, attention_layers.py, sequence_layers.py) take a `Value` and a `Tape`, and return the
resulting value. On the tape they record the tensors that autograd would keep and the products that are computed. Memory
is followed piece by piece (`Store`), once in fp32 and once under autocast, so that a tensor that two layers keep is
charged once.

The model of memory: a product or convolution keeps its input, in 16 bits under autocast (a copy, if it was in 32); an
elementwise function keeps its input or its result as its derivative needs; views share their piece. This is torch on
CPUs; on GPUs dropout keeps less, and norms after a product keep more under autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NoReturn, TypeVar

from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.nodes import BufferNode, LayerNode, ModulePart, ParameterNode
from dslc.compiler.ir.parameter_names import SECOND, AdapterNames, base_name, is_of_adapter
from dslc.compiler.ir.steps import InitStep, ModuleStep
from dslc.compiler.ir.tensor_styles import TensorStyle
from dslc.compiler.model import tensor_tape
from dslc.compiler.model.float8 import ProductMoments, fits, product_moments, stays_in_bf16
from dslc.compiler.model.operation_counts import OPERATIONS
from dslc.compiler.model.replay import MemoryRecorder, Operation, Store, reorders
from dslc.compiler.model.value import Shape, Value
from dslc.compiler.placement.shares import largest
from dslc.dsl.bounds import LAYERS as MOST_LAYERS
from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language.calls import Fp8, Lora
from dslc.dsl.language.layers import Conv2d, Repeat
from dslc.dsl.language.registry import Call
from dslc.dsl.source import Span, short_line

# (name, shape, kind, a, b) -> (kind, a, b): a library network's change to torch's default initial values.
Initialise = Callable[[str, Shape, str, float, float], tuple[str, float, float]]


NO_REORDERS = ((0, 0), (0, 0))  # in fp32 and under autocast


class LayerInputError(Exception):
    """A layer cannot take its input. Later layers have no shape, so nothing is reported for them."""

    def __init__(self, diagnostic: Diagnostic) -> None:
        super().__init__(diagnostic.message)
        self.diagnostic = diagnostic


@dataclass(eq=False, repr=False)
class Surroundings:
    """The context that all layers of a model share, and their collected results."""

    source: SourceFacts
    network: Call | None = None  # the library network, at which its layers' mistakes point
    initialise: Initialise | None = None
    ranks: int = 1  # of a tensor axis; the layers are those of its first rank, with the styles of each module
    styles: Mapping[str, Sequence[TensorStyle]] = field(default_factory=dict)
    on_cpu: bool = False  # ranks exchange tensors over gloo
    pieces: int = 1  # of a sequence, one for each rank of a context axis
    expert_ranks: int = 1  # which share the experts of each layer
    expert_skew: float = 1.0  # the rows of the busiest of them, over the even share
    frozen: frozenset[str] = frozenset()  # names of parameters that do not train
    float8: Fp8 | None = None  # products of dense layers in 8 bits
    adapter: Lora | None = None
    warnings: list[Diagnostic] = field(default_factory=list)
    suspects: list[Note] = field(default_factory=list)  # possible causes of an output that does not fit
    inits: list[InitStep] = field(default_factory=list)
    batch_norm_sync: set[bool] = field(default_factory=set)
    batch_norm_values: int | None = None
    noise: bool = False
    tied: list[tuple[str, Shape, Call]] = field(default_factory=list)  # weights of an embedding: name, shape, layer
    layers: int = 0  # seen so far, including nested layers
    recorded: _Recorded | None = None  # the last block
    nodes: list[LayerNode] = field(default_factory=list)
    steps: list[tuple[str, ModuleStep]] = field(default_factory=list)

    @cached_property
    def adapter_names(self) -> AdapterNames | None:
        """The adapter's targets and what it trains, by name."""
        return AdapterNames(self.adapter.targets, self.adapter.save) if self.adapter is not None else None

    def trains(self, parameter: str) -> bool:
        """True if a parameter trains, by `freeze` and the adapter."""
        return parameter not in self.frozen and (self.adapter_names is None or self.adapter_names.trains(parameter))

    @cached_property
    def styles_in(self) -> dict[str, dict[str, Sequence[TensorStyle]]]:
        """Returns the styles by module: of the modules inside it, by their names there, and its own."""
        by_layer: dict[str, dict[str, Sequence[TensorStyle]]] = {}
        for name, styles in self.styles.items():
            parts = name.split(".")
            for n in range(1, len(parts) + 1):
                by_layer.setdefault(".".join(parts[:n]), {})[".".join(parts[n:])] = styles
        return by_layer


@dataclass(eq=False, repr=False)
class _Frame:
    prefix: str
    kind: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    children: list[ModuleStep] = field(default_factory=list)
    training: set[str] = field(default_factory=set)  # its parameters that train


LayerFunction = Callable[[Any, Value, "Tape"], Value]
LAYERS: dict[type[Call], LayerFunction] = {}
RECOMPUTABLE: set[type[Call]] = set()
F = TypeVar("F", bound=LayerFunction)


def layer(*specs: type[Call], recomputable: bool = False) -> Callable[[F], F]:
    """Registers the arithmetic of a layer; `recomputable`: it is worth recomputing in the backward pass."""

    def declare(function: F) -> F:
        LAYERS.update(dict.fromkeys(specs, function))
        if recomputable:
            RECOMPUTABLE.update(specs)
        return function

    return declare


class Tape:
    """Records one `LayerNode`."""

    def __init__(self, surroundings: Surroundings, name: str) -> None:
        self.around = surroundings
        self.name = name
        self.forward = self.backward = 0
        self.float32, self.autocast = MemoryRecorder(), MemoryRecorder()
        self.masks = 0  # numbers
        self.multiplies = False
        self.operations = 0
        self.parameters: list[ParameterNode] = []
        self.buffers: list[BufferNode] = []
        self.parts: list[ModulePart] = []
        self._weighed = 0  # parameters assigned to operations so far
        self._taken: Value | None = None  # the input of the current product
        self._frame = _Frame("")

    # ------------------------------------------------------------------------------------- for a layer's function

    def module(self, kind: str, **arguments: Any) -> None:
        """Sets the module of this layer: a class of torch.nn, or `.Name` of dslc.runtime.model.modules."""
        self._frame.kind, self._frame.arguments = kind, arguments

    def parameter(self, name: str, shape: Shape, kind: str, a: float, b: float = 0.0, *, experts: int = 0) -> None:
        """Adds a parameter; of `experts`, one in each row, this rank has its share."""
        full = self._frame.prefix + name
        if experts:
            shape = (largest(experts, self.around.expert_ranks), *shape[1:])
        if is_of_adapter(full):
            kind, a, b = ("constant", 0.0, 0.0) if full.endswith(f"{SECOND}.weight") else (kind, a, b)
        elif self.around.initialise is not None:
            kind, a, b = self.around.initialise(base_name(full), shape, kind, a, b)
        init = InitStep(parameter=full, shape=shape, kind=kind, a=a, b=b)  # type: ignore[arg-type]
        self.around.inits.append(init)
        names = self.around.adapter_names
        trains = names is None or names.trains(full)
        self.parameters.append(ParameterNode(name=full, shape=shape, init=init, experts=experts, trains=trains))
        if self.around.trains(full):
            self._frame.training.add(name)

    def trains(self, *names: str) -> bool:
        """True if one of these parameters of the module trains; without names, if any of it does."""
        return bool(self._frame.training.intersection(names) if names else self._frame.training)

    def buffer(self, name: str, shape: Shape, dtype: str, *, saved: bool = True) -> None:
        self.buffers.append(BufferNode(name=self._frame.prefix + name, shape=shape, dtype=dtype, saved=saved))

    @property
    def module_name(self) -> str:
        """The full name of this module."""
        return self._frame.prefix.removesuffix(".")

    @property
    def styles(self) -> Sequence[TensorStyle]:
        """The styles of this module on the tensor axis."""
        return self.around.styles.get(self.module_name, ())

    def product(
        self, x: Value, multiply_adds: int, *shape: int, keeps_input: bool | None = None, weight: str = "weight"
    ) -> Value:
        """Returns the result of x and a weight; keeps x, for the weight's gradient, unless the weight is frozen."""
        trains = self.trains(weight)
        operand = self.cast(x)
        if operand.autocast is not x.autocast:
            copy = Operation(takes=(x.autocast,), gives=operand.autocast, differentiates=x.grad, backward=x.grad)
            self.autocast.operations.append(copy)
        self._taken = operand
        if keeps_input if keeps_input is not None else trains:
            self.keep(operand)
        self.forward += 2 * multiply_adds
        self.backward += 2 * multiply_adds * (x.grad + trains)
        return self.computed(x.new(*shape, low=True, grad=x.grad or self.trains()))

    def computed(self, result: Value) -> Value:
        """Records a result that selective recomputation keeps."""
        self.float32.products += result.float32.bytes
        self.autocast.products += result.autocast.bytes
        return result

    def cast(self, x: Value) -> Value:
        """Returns x as autocast passes it to a product."""
        return x if x.low else replace(x, low=True, autocast=Store(2 * x.count))

    def keep(self, x: Value) -> None:
        """Records that the backward pass needs x."""
        self.float32.keep(x.float32)
        self.autocast.keep(x.autocast)

    def keep_bytes(self, float32: int, autocast: int) -> None:
        """Records other bytes that the backward pass needs."""
        self.float32.keep(Store(float32))
        self.autocast.keep(Store(autocast))

    def operation(
        self,
        *takes: Value,
        gives: Value,
        adds: bool = False,
        view: bool = False,
        passing: tuple[int, int] = (0, 0),
        scratch: tuple[int, int] = (0, 0),
        rounds: int = 0,
        holds: tuple[Value, ...] = (),
        ordered: tuple[int, int] = (0, 0),
        ordered_rounds: int = 0,
        reorders: Sequence[tuple[int, int]] = NO_REORDERS,
        float8: ProductMoments | None = None,
        rearranged: int = 0,
    ) -> Value:
        """Records that `gives` was computed from `takes`, with everything kept since the last operation. A layer
        without parts is one operation by itself. `passing`: temporary bytes of its forward pass, `scratch` of its
        backward pass, each in fp32 and under autocast; `rounds`: the copies of its weights' gradients; `holds`: values
        that the module's variables still hold. `ordered`, `ordered_rounds` and `reorders` are fields of `Operation`.
        `float8` are moments of a product that has 8 bits in place of autocast's 16. `rearranged` are numbers of weights
        that are copied in another order; autocast's own copies replace them.
        """
        parameters = self.parameters[self._weighed :]
        weights = sum(q.count for q in parameters if self.around.trains(q.name))
        casts = self._taken is not None and float8 is None
        cast = sum(q.count for q in parameters if len(q.shape) > 1) if casts else 0
        self._weighed = len(self.parameters)
        graded = any(x.grad for x in takes)
        stores_held = (tuple(x.float32 for x in holds), tuple(x.autocast for x in holds))
        for precision, (saved, stores, result) in enumerate(
            (
                (self.float32, tuple(x.float32 for x in takes), gives.float32),
                (self.autocast, tuple(x.autocast for x in takes), gives.autocast),
            )
        ):
            if view and result is not stores[0]:
                result.of = stores[0].of or stores[0]
            saved.operations.append(
                Operation(
                    takes=stores,
                    gives=result,
                    kept=saved.since(),
                    weights=weights,
                    copied=cast if graded else 0,
                    cast=0 if graded else cast,
                    rearranged=0 if precision else rearranged,
                    differentiates=graded,
                    constants=tuple(store for x, store in zip(takes, stores, strict=True) if not x.grad),
                    backward=gives.grad,
                    adds=adds,
                    view=view,
                    passing=passing[precision],
                    scratch=scratch[precision],
                    rounds=rounds,
                    holds=stores_held[precision],
                    ordered=ordered[precision],
                    ordered_rounds=ordered_rounds,
                    reorders=reorders[precision],
                    float8=float8 if precision else None,
                )
            )
        self._taken = None
        return gives

    def fail(
        self,
        code: str,
        message: str,
        spec: Call,
        argument: str = "",
        *,
        label: str = "",
        notes: Iterable[Note] = (),
        help: str = "",
    ) -> NoReturn:
        raise LayerInputError(self.diagnostic(code, message, spec, argument, label=label, notes=notes, help=help))

    def warn(self, code: str, message: str, spec: Call, argument: str = "", *, help: str = "") -> None:
        self.around.warnings.append(self.diagnostic(code, message, spec, argument, help=help))

    def diagnostic(
        self,
        code: str,
        message: str,
        spec: Call,
        argument: str = "",
        *,
        label: str = "",
        notes: Iterable[Note] = (),
        help: str = "",
    ) -> Diagnostic:
        network = self.around.network
        inside = (Note(f"it is `{self.name}` of `{network.word}`", None),) if network else ()
        return Diagnostic(
            code=code,
            message=message,
            span=spec.value_span(argument) if argument else spec.span,
            label=label,
            notes=(*notes, *inside),
            help=help,
        )

    # --------------------------------------------------------------------------------------- layers within layers

    def child(self, name: str, spec: Call, x: Value) -> Value:
        """Runs a layer as the attribute `name` of this one."""
        outer = self._frame
        self._frame = _Frame(f"{outer.prefix}{name}." if name else outer.prefix)
        styles, ranks = self.around.styles.get(outer.prefix + name, ()), self.around.ranks
        on_cpu = self.around.on_cpu
        spec, x = tensor_tape.shard_input(styles, ranks, spec, x, self.operation, on_cpu)
        operations_before, self._taken = len(self.float32.operations), None
        y = LAYERS[type(spec)](spec, x, self)
        self.operations += OPERATIONS.get(spec.word, 1)
        if TensorStyle.VOCABULARY in styles:
            table = self.parameters[-1]
            self.parameters[-1] = replace(table, shape=(table.shape[0] // ranks, *table.shape[1:]))
        if len(self.float32.operations) == operations_before and y is not x:
            self._record_module(spec, x, y)
        frame, self._frame = self._frame, outer
        if not frame.children or spec.word in ("attention", "gated_mlp", "moe"):
            self.parts.append(
                ModulePart(
                    name=outer.prefix + name,
                    kind=spec.word,
                    takes=x.shape,
                    gives=y.shape,
                    takes_low=x.low,
                    gives_low=y.low,
                )
            )
        outer.children.append(
            ModuleStep(
                name=name,
                kind=frame.kind,
                arguments=frame.arguments,
                children=tuple(frame.children),
                line=short_line(spec.span),
            )
        )
        return tensor_tape.exchange_output(styles, ranks, y, self.operation, on_cpu)

    def _record_module(self, spec: Call, x: Value, y: Value) -> None:
        """Records a layer without parts, which is one operation."""
        operand = self._taken or x
        # torch's kernels on CPUs make a batch norm's gradient, and a convolution's weight gradient, in steps. Where
        # channels are last, a gradient that comes through a flattening has other strides: pooling copies all its
        # tensors to that layout.
        ordered, conv = (0, 0), spec if isinstance(spec, Conv2d) else None
        if spec.word == "flatten" and x.pooled:
            ordered = (8 * x.pooled + 8 * x.count, (4 if x.low else 8) * x.pooled + 8 * x.count)
        stores = ((operand.float32, y.float32), (operand.autocast, y.autocast))
        self.operation(
            operand,
            gives=y,
            view=y.float32 is operand.float32,
            scratch=(y.float32.bytes, y.autocast.bytes) if spec.word == "batch_norm" else (0, 0),
            rounds=2 if spec.word == "conv1d" else 0,
            ordered=ordered,
            ordered_rounds=2 if conv else 0,
            reorders=[reorders(conv, *pair) for pair in stores] if conv else NO_REORDERS,
            float8=self._float8_moments(spec, operand, y),
        )

    def _float8_moments(self, spec: Call, x: Value, y: Value) -> ProductMoments | None:
        """Returns the moments of a layer that multiplies in 8 bits; None for any other."""
        precision, name = self.around.float8, self.module_name
        if precision is None or spec.word != "linear" or not self.trains("weight"):
            return None
        columns, rows = x.shape[-1], y.shape[-1]
        if not fits(rows, columns) or stays_in_bf16(precision, name):
            return None
        return product_moments(
            x.count // columns, columns, rows, emulated=precision.emulate, gathered=precision.all_gather
        )

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Makes the children run inside parts of the attribute `name`, a Sequential."""
        outer = self._frame
        self._frame = frame = _Frame(f"{outer.prefix}{name}.")
        try:
            yield
        finally:
            self._frame = outer
        outer.children.append(ModuleStep(name=name, kind="Sequential", children=tuple(frame.children)))


def argument_spans(enclosing_call: Call, **renamed: str) -> dict[str, Any]:
    """Returns the spans for layers of `enclosing_call`: mistakes point at its arguments of the same (or that) name."""
    places = dict(enclosing_call.places)
    for argument, enclosing_name in renamed.items():
        places.pop(argument, None)
        if enclosing_name in enclosing_call.places:
            places[argument] = enclosing_call.places[enclosing_name]
    return {"span": enclosing_call.span, "places": places}


@dataclass(eq=False, repr=False)
class _Recorded:
    """A recorded block, reused under another name if its input is the same."""

    name: str
    spec: Call
    given: tuple[object, ...]  # properties of its input
    styles: dict[str, Sequence[TensorStyle]]  # of its modules, by their names in it
    left: tuple[bool, bool]  # true if its input is kept after it, in fp32 and under autocast
    gives: Value
    node: LayerNode
    step: ModuleStep
    inits: Sequence[InitStep]

    def is_same_layer(self, spec: Call, around: Surroundings, name: str) -> bool:
        """True if `spec` stands at the same place of the job, with the same styles, adapters and frozen parameters."""
        if self.spec != spec or self.spec.span != spec.span or self.styles != around.styles_in.get(name, {}):
            return False
        names, frozen, adapters = [q.name for q in self.node.parameters], around.frozen, around.adapter_names
        if adapters is not None and adapters.marks(names) != adapters.marks(name + q[len(self.name) :] for q in names):
            return False
        return not frozen or all((q in frozen) == (name + q[len(self.name) :] in frozen) for q in names)

    def has_same_products(self, float8: Fp8 | None, name: str) -> bool:
        """True if the same parts as under `name` are left out of products in 8 bits."""
        if float8 is None or not float8.skip:
            return True
        parts, skips = [part.name for part in self.node.parts], partial(stays_in_bf16, float8)
        return all(skips(part) == skips(name + part[len(self.name) :]) for part in parts)

    def repeat(self, surroundings: Surroundings, name: str, x: Value) -> Value:
        x.float32.kept, x.autocast.kept = self.left
        prefix_length = len(self.name)
        inits = [replace(init, parameter=name + init.parameter[prefix_length:]) for init in self.inits]
        node = self.node
        parameters = (
            replace(parameter, name=init.parameter, init=init)
            for parameter, init in zip(node.parameters, inits, strict=True)  # each has its own
        )
        surroundings.inits.extend(inits)
        surroundings.nodes.append(
            replace(
                node,
                name=name,
                parameters=tuple(parameters),
                buffers=tuple(replace(buffer, name=name + buffer.name[prefix_length:]) for buffer in node.buffers),
                parts=tuple(part._replace(name=name + part.name[prefix_length:]) for part in node.parts),
            )
        )
        surroundings.steps.append((name, replace(self.step, name=name.rpartition(".")[2])))
        y = self.gives
        return replace(y, float32=Store(y.float32.bytes), autocast=Store(y.autocast.bytes))


def _like(x: Value) -> tuple[object, ...]:
    """Returns all properties of a value that a layer depends on."""
    stores = [(store.bytes, store.kept, store.by_block) for store in (x.float32, x.autocast)]
    return (x.shape, x.tokens, x.low, x.grad, x.sequence, x.pooled, x.float32 is x.autocast, stores)


def record(surroundings: Surroundings, name: str, spec: Call, x: Value) -> Value:
    """Runs one layer of the model's list under its full name, and records its node and module. Raises LayerInputError.

    A block like the one before it is not run again; its record is copied.
    """
    input_like, recorded_before = _like(x), surroundings.recorded
    if (
        recorded_before
        and recorded_before.given == input_like
        and recorded_before.is_same_layer(spec, surroundings, name)
        and recorded_before.has_same_products(surroundings.float8, name)
    ):
        return recorded_before.repeat(surroundings, name, x)
    finding_counts, init_count = (len(surroundings.warnings), len(surroundings.suspects)), len(surroundings.inits)
    tape = Tape(surroundings, name)
    path, _, last_part = name.rpartition(".")
    tape._frame.prefix = f"{path}." if path else ""
    tape.float32.enter(x.float32)
    tape.autocast.enter(x.autocast)
    y = tape.child(last_part, spec, x)
    recomputes = type(spec) in RECOMPUTABLE
    node = LayerNode(
        name=name,
        kind=spec.word,
        span=spec.span,
        input=x.fact,
        output=y.fact,
        parameters=tuple(tape.parameters),
        buffers=tuple(tape.buffers),
        forward_flops=tape.forward,
        backward_flops=tape.backward,
        float32=tape.float32.memory(y.float32, recomputes),
        autocast=tape.autocast.memory(y.autocast, recomputes),
        recomputable=recomputes,
        low=y.low,
        parts=tuple(tape.parts),
        masks=tape.masks,
        multiplies=tape.multiplies,
        operations=tape.operations,
    )
    step = tape._frame.children[0]
    surroundings.nodes.append(node)
    surroundings.steps.append((name, step))
    surroundings.recorded = None
    plain = y.float32 is not x.float32 and y.autocast is not x.autocast and y.float32 is not y.autocast
    stores_left, inits = (x.float32.kept, x.autocast.kept), surroundings.inits[init_count:]
    silent = finding_counts == (len(surroundings.warnings), len(surroundings.suspects))
    if recomputes and plain and silent and not y.float32.kept and len(inits) == len(node.parameters):
        surroundings.recorded = _Recorded(
            name, spec, input_like, surroundings.styles_in.get(name, {}), stores_left, y, node, step, inits
        )
    return y


def unroll(surroundings: Surroundings, layers: Iterable[Call], x: Value, run: Callable[[Call, Value], Value]) -> Value:
    """Runs a list of layers, with `repeat` unrolled. If a body cannot take its own output, that is the repeat's
    mistake.
    """
    for spec in layers:
        if not isinstance(spec, Repeat):
            surroundings.layers += 1
            if surroundings.layers > MOST_LAYERS.most:
                raise LayerInputError(too_many(spec.span))
            x = run(spec, x)
            continue
        for number in range(spec.count):
            previous = x
            try:
                x = unroll(surroundings, spec.layers, x, run)
            except LayerInputError as misfit:
                if number == 0 or misfit.diagnostic.code in ("E0211", "E0221"):
                    raise
                raise LayerInputError(_next_round(spec, number + 1, previous, misfit.diagnostic)) from misfit
    return x


def _next_round(spec: Call, number: int, previous: Value, cause: Diagnostic) -> Diagnostic:
    return Diagnostic(
        code="E0211",
        message=f"round {number} of `repeat` starts from {previous}, and its layers cannot take that",
        span=spec.span,
        notes=(Note(cause.message, cause.span), *cause.notes),
        help="repeat layers that give back the shape they take, or fewer times",
    )


def too_many(span: Span | None) -> Diagnostic:
    return Diagnostic(
        code="E0221",
        message=f"the network has more than {MOST_LAYERS.most:,} layers",
        span=span,
        help="fewer layers, or a smaller `count` of `repeat`",
    )
