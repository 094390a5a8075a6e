"""Records the forward pass of a user's own module call by call, so that a part of it can be run alone.

Model: the module runs on tensors without memory (torch's FakeTensorMode). Its layers, which are named, are called as
they are and make one call each; the code between them is recorded function by function, as the module calls torch. A
layer without parameters whose results have no gradient (tables of rotary embeddings, masks) is recorded like the code
between layers. The list holds no shapes: a whole number that grows with the batch is recorded as a multiple of the
samples, found by comparing two runs with different batches. There is one list for training and one for evaluation. If a
tensor axis cuts the module, the list is a rank's: between its layers are shares wherever a rank has shares, and numbers
that follow from their sizes are the rank's own.

A call is *own* to every stage if it needs only the input, buffers and constants: it draws no random numbers and touches
no parameter. Every stage that needs its results computes them again; every other call belongs to one stage. Tensors
that modules keep as plain attributes are constants (`_Attributes`): every rank makes the whole module.

Contract: running the list gives the module's output, for any number of samples. A module that cannot be recorded raises
a CaptureError with the reason and the line.

Limits: conditions on shapes and on the module's own state stay as in the capture. Hooks on the module itself and on
containers do not run.
"""

from __future__ import annotations

import contextlib
import enum
import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dslc.compiler.ir.program import PrecisionStep, TensorParallelStep
from dslc.compiler.trace.fake_tensor_mode import FakeTensorMode, detect_fake_mode
from dslc.compiler.trace.private_torch import (
    AnyBatchNorm,
    DataDependentOutputException,
    DynamicOutputShapeException,
    OperationMode,
    Operator,
    own_buffers,
    own_parameters,
    storage_identity,
    times_written,
    unset_fake_temporarily,
    without_torch_function,
)
from dslc.compiler.trace.structures import attribute_tensors, flatten
from dslc.runtime.parallel.tensor_parallel import as_on_a_rank
from dslc.runtime.pipeline.input_form import InputForm
from dslc.runtime.pipeline.recording import (
    LARGE,
    SMALL,
    Call,
    CaptureError,
    Constant,
    Fact,
    ModuleTensor,
    RecordedValue,
    Recording,
    Result,
    filled,
    full,
    map_parts,
    merged,
    tensors_of,
    touches,
)
from dslc.runtime.pipeline.repeated_uses import repeated_uses
from dslc.runtime.process.frame_ownership import is_users
from dslc.runtime.technique import sample_pass

_ASKS = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist"}
_LOST = {"register_hook", "register_post_accumulate_grad_hook", "backward", "__set__"}
_PLAIN = (bool, int, float, complex, str, bytes, range, enum.Enum, type, types.FunctionType, types.BuiltinFunctionType)
_ATTRIBUTE = "is a plain attribute: a buffer of a layer (`register_buffer`) may be changed by that layer"
_TORCHS = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def capture(
    model: nn.Module,
    layers: Sequence[str],
    input_form: InputForm,
    precision: PrecisionStep,
    tensor: TensorParallelStep | None = None,
) -> dict[bool, Recording]:
    """Returns the forward pass in training (True) and in evaluation (False), for batches of this form; with `tensor`,
    the forward pass of a rank of a tensor axis.

    `model` is on any device, whole, and stays as it is. `layers` are paths, in any order; "" stands for no layer.
    Raises CaptureError; an exception of the module's own code passes through.
    """
    # A module that was traced may have tensors of that mode besides its parameters.
    fake = detect_fake_mode(list(model.parameters())) or FakeTensorMode(allow_non_fake_inputs=True)
    low = getattr(torch, precision.dtype) if precision.dtype != "float32" else None
    modules = {name: model.get_submodule(name) for name in layers if name}
    training = model.training
    recordings = {}
    attributes = _Attributes(model, fake)
    with (
        _pretending(model, fake, low if precision.level == "O2" else None),
        as_on_a_rank(tensor, model) if tensor is not None else contextlib.nullcontext(),
    ):
        summed_layers = [name for name, style in tensor.styles if style == "summed"] if tensor is not None else []
        opened_layers: frozenset[str] = frozenset()

        def run(samples: int) -> _CallRecorder:
            recorder = _CallRecorder(
                model, modules, opened_layers, fake, low if precision.level == "O1" else None, summed_layers, attributes
            )
            try:
                recorder.go(input_form, samples, low if precision.level == "O2" else None)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                reason = f"its forward reads numbers out of tensors (`{error.func}`)"
                raise CaptureError(reason, _line_of(error)) from error
            return recorder

        try:
            opened_layers = frozenset(run(SMALL).without_gradient)
            for mode in (True, False):
                model.train(mode)
                recordings[mode] = merged(run(SMALL).recording, run(LARGE).recording)
        finally:
            model.train(training)
    return recordings


@contextlib.contextmanager
def _pretending(model: nn.Module, fake: FakeTensorMode, low: torch.dtype | None) -> Iterator[None]:
    """Replaces the module's tensors by CPU tensors without memory that all could train; tied ones stay tied."""
    originals: list[tuple[Any, str, Tensor]] = []
    replacements: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (own_parameters(module), own_buffers(module)):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                originals.append((tensors, name, tensor))
                if id(tensor) not in replacements:
                    trains = tensors is own_parameters(module) and tensor.is_floating_point()
                    dtype = low if low is not None and trains else tensor.dtype
                    with fake:
                        replacement = torch.empty(tuple(tensor.shape), dtype=dtype)
                    replacements[id(tensor)] = (
                        nn.Parameter(replacement, trains) if tensors is own_parameters(module) else replacement
                    )
                tensors[name] = replacements[id(tensor)]  # type: ignore[assignment]
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for tensors, name, tensor in originals:
            tensors[name] = tensor
        for module, training in modes:
            module.training = training


# ------------------------------------------------------------------------------------------------------- one run


class _CallRecorder(TorchFunctionMode):
    """Records one forward pass."""

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        opened_layers: frozenset[str],
        fake: FakeTensorMode,
        low: torch.dtype | None,
        summed_layers: Sequence[str],
        attributes: _Attributes,
    ) -> None:
        super().__init__()
        self._attributes = attributes
        self.recording = Recording()
        self.without_gradient: set[str] = set()
        self._model, self._layers, self._opened, self._fake, self._low = model, layers, opened_layers, fake, low
        self._inside: list[str] = []
        self._before: tuple[tuple[object, ...], Mapping[str, object], dict[int, int]] = ((), {}, {})
        self._random = False
        self._drawn: Counter[sample_pass.DrawingLayer | None] = Counter()  # draws of each module
        self._noted = self._drawn.copy()  # when the last call was noted
        self._known: dict[int, RecordedValue | ModuleTensor] = {}
        self._nodes: dict[int, str] = {}  # autograd nodes, by value
        self._rewritten: set[int] = set()  # memory that calls have written into: its views have new nodes
        self._alive: list[Tensor] = []  # kept alive so that no tensor's identity is used again
        for path, module in model.named_modules():
            for name, tensor in (*own_parameters(module).items(), *own_buffers(module).items()):
                if tensor is not None:
                    self._known.setdefault(id(tensor), ModuleTensor(path, name))
        parameters = {id(parameter) for parameter in model.parameters()}
        self._parameters = {
            ref for key, ref in self._known.items() if key in parameters and isinstance(ref, ModuleTensor)
        }
        self._storages = {_memory(p): ModuleTensor(*name.rpartition(".")[::2]) for name, p in model.named_parameters()}
        # Parameters whose gradients their modules add up over a tensor axis, while they run.
        self._summed = {
            self._known[id(p)] for name in summed_layers for p in model.get_submodule(name).parameters(False)
        }
        self._own: dict[str, set[int]] = {}  # the memory of a layer's parameters
        self._foreign: set[ModuleTensor] = set()  # parameters that a layer uses and that belong elsewhere

    def go(self, input_form: InputForm, samples: int, low: torch.dtype | None) -> None:
        with self._fake:
            inputs = input_form.empty(samples, low)
        self.recording.inputs = len(inputs)
        for tensor in inputs:
            self._number(tensor, is_own=True)
        with contextlib.ExitStack() as contexts:
            for path, module in self._layers.items():
                # Runs before other hooks on the way in, and after them on the way out: the hooks belong to the layer.
                enter = module.register_forward_pre_hook(self._enter(path), prepend=True, with_kwargs=True)
                contexts.callback(enter.remove)
                leave = module.register_forward_hook(self._leave(path), with_kwargs=True)
                contexts.callback(leave.remove)
            contexts.enter_context(_with_known_numbers(lambda tensor: self._constant(tensor) is not None))
            contexts.enter_context(self._fake)
            contexts.enter_context(OperationMode(self._watched))
            contexts.enter_context(
                torch.autocast("cpu", dtype=self._low or torch.bfloat16, enabled=self._low is not None)
            )
            contexts.enter_context(torch.enable_grad())
            self._ambient = _cast()
            with self:
                output = input_form.run(self._model, inputs)
        leaves, form = flatten(output)
        result = Result([self._returned(leaf) for leaf in leaves], form)
        self.recording.result = result
        self.recording.outputs = tuple(leaf.number for leaf in result.leaves if isinstance(leaf, RecordedValue))
        if not self.recording.outputs:
            raise CaptureError("what it returns is not a tensor that its forward computes")
        parameters = {id(parameter): self._known[id(parameter)] for parameter in self._model.parameters()}
        names = {key: reference for key, reference in parameters.items() if isinstance(reference, ModuleTensor)}
        self.recording.repeated = repeated_uses(self.recording, self._alive, names)

    def _returned(self, leaf: object) -> object:
        """Returns a leaf of the output, or a reference to the tensor that it is."""
        if isinstance(leaf, Tensor):
            reference = self._known.get(id(leaf))
            if not isinstance(reference, RecordedValue):
                raise CaptureError("what it returns is not a tensor that its forward computes")
            self._check(leaf, reference.number)
            return reference
        if leaf is None or isinstance(leaf, _PLAIN + _TORCHS):
            return leaf
        raise CaptureError(f"it returns a `{type(leaf).__name__}`, which may hold tensors")

    # ------------------------------------------------------------------------------------------------- watching

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _ASKS and isinstance(args[0], Tensor) and (constant := self._constant(args[0])) is not None:
            with unset_fake_temporarily():
                return func(constant, *args[1:], **kwargs)
        if name in _LOST:
            raise CaptureError(f"its forward calls `{name}` on a tensor", _line())
        versions = _versions((args, kwargs))
        self._random, self._foreign = False, set()
        result = func(*args, **kwargs)
        self._note(func, False, args, kwargs, result, versions)
        return result

    def _enter(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
            if not self._inside:
                self.recording.starts.setdefault(path, len(self.recording.calls))
                if path in self._opened:
                    return
                self._before, self._random = (args, kwargs, _versions((args, kwargs))), False
                self._foreign = set()
            if path not in self._opened:
                self._inside.append(path)

        return hook

    def _leave(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], output: object) -> None:
            if not self._inside or path in self._opened:
                return
            self._inside.pop()
            if self._inside:
                return
            args, kwargs, versions = self._before
            tensors = tensors_of(output)
            plain = not any(True for _ in module.parameters()) and not isinstance(module, AnyBatchNorm)
            if plain and tensors and not any(tensor.requires_grad for tensor in tensors):
                self.without_gradient.add(path)
            self._note(path, True, args, kwargs, output, versions)

        return hook

    def _watched(self, func: Operator, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in str(func):
            self._random = True
            self._drawn[sample_pass.current_layer()] += 1
        if self._inside:
            self._look(args, kwargs)
        return func(*args, **kwargs)

    def _look(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Notes parameters that the running layer takes from elsewhere."""
        for tensor in tensors_of((args, kwargs)):
            parameter = self._storages.get(_memory(tensor))
            if parameter is not None and not self._within(tensor, self._inside[0]):
                self._foreign.add(parameter)

    def _within(self, tensor: Tensor, path: str) -> bool:
        if path not in self._own:
            self._own[path] = {_memory(parameter) for parameter in self._layers[path].parameters()}
        return _memory(tensor) in self._own[path]

    # ---------------------------------------------------------------------------------------------- writing down

    def _note(
        self,
        target: Any,
        layer: bool,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        result: object,
        versions: dict[int, int],
    ) -> None:
        for tensor in tensors_of((args, kwargs)):
            if (name := self._attributes.name_of(tensor)) and times_written(tensor) != versions.get(id(tensor)):
                raise CaptureError(f"its forward changes `{name}`, which {_ATTRIBUTE}", _line())
        changed_keys = {
            key for key, version in _versions((args, kwargs)).items() if versions.get(key, version) != version
        }
        tensors = tensors_of(result)
        if not tensors and not changed_keys and not layer:
            return
        facts = self.recording.facts
        changes = {self._known[key] for key in changed_keys if key in self._known}
        for reference in changes:
            if isinstance(reference, ModuleTensor):
                raise CaptureError(f"its forward changes `{full(reference)}` outside of a layer", _line())
            if any(facts[reference.number].memory == facts[n].memory for n in range(self.recording.inputs)):
                raise CaptureError("its forward writes into its own input", _line())
            self._rewritten.add(facts[reference.number].memory)
        input_numbers: set[int] = set()
        module_tensors: set[ModuleTensor] = set()
        references = (
            self._replace_tensors(args, input_numbers, module_tensors, target),
            self._replace_tensors(kwargs, input_numbers, module_tensors, target),
        )
        if astray := (module_tensors | self._foreign) & self._summed:
            reason = f"`{full(min(astray))}` is used outside of a layer, where nothing adds up its gradients"
            raise CaptureError(reason, _line())
        trains = not module_tensors.isdisjoint(self._parameters)
        is_own = not (layer or trains or self._random) and all(facts[number].own for number in input_numbers)
        drawing = sample_pass.current_layer()
        call = Call(
            what=target,
            layer=layer,
            args=references[0],
            kwargs=references[1],
            gives=tuple(self._number(tensor, is_own=is_own) for tensor in tensors),
            takes=frozenset(input_numbers),
            held=frozenset(module_tensors | self._foreign),
            changes=frozenset(reference.number for reference in changes if isinstance(reference, RecordedValue)),
            own=is_own,
            grad=torch.is_grad_enabled(),
            cast=None if _cast() == self._ambient else _cast(),
            where=_line(),
            drawing=drawing,
            drawn=self._noted[drawing],
        )
        self._noted = self._drawn.copy()
        self.recording.calls.append(call)

    def _number(self, tensor: Tensor, is_own: bool) -> int:
        reference = self._known.get(id(tensor))
        if isinstance(reference, RecordedValue):
            self._nodes[reference.number] = _node(tensor)
            return reference.number
        number = len(self.recording.facts)
        self._alive.append(tensor)
        self._nodes[number] = _node(tensor)
        if reference is None:
            self._known[id(tensor)] = RecordedValue(number)
        self.recording.facts[number] = Fact(
            small=tuple(tensor.shape),
            dtype=tensor.dtype,
            memory=_memory(tensor),
            own=is_own,
        )
        return number

    def _replace_tensors(
        self, value: Any, input_numbers: set[int], module_tensors: set[ModuleTensor], target: Any
    ) -> Any:
        """Replaces the tensors in `value` by references, and adds these to `input_numbers` and `module_tensors`."""
        if isinstance(value, Tensor):
            reference = self._known.get(id(value))
            if reference is None and (fault := self._attributes.fault(value, self._model)):
                raise CaptureError(fault, _line())
            if isinstance(reference, RecordedValue):
                self._check(value, reference.number)
                input_numbers.add(reference.number)
            elif reference is not None:
                module_tensors.add(reference)
            return Constant(value) if reference is None else reference
        if isinstance(value, slice | tuple | list | dict):
            return map_parts(lambda part: self._replace_tensors(part, input_numbers, module_tensors, target), value)
        if value is None or value is Ellipsis or isinstance(value, _PLAIN + _TORCHS):
            return value
        taker = f"`{target}`" if isinstance(target, str) else "torch"
        raise CaptureError(f"it hands {taker} a `{type(value).__name__}`, which may hold tensors", _line())

    def _check(self, tensor: Tensor, number: int) -> None:
        """Raises for a tensor from a custom autograd function: the calls recorded inside it lack its gradient."""
        rewritten = self.recording.facts[number].memory in self._rewritten
        if self._nodes[number] != (node := _node(tensor)) and not rewritten:
            raise CaptureError(f"it uses a tensor whose gradient `{node}` computes outside of a layer", _line())

    # -------------------------------------------------------------------------------------------------- constants

    def _constant(self, tensor: Tensor) -> Tensor | None:
        """Returns the numbers of a tensor that follows from constants alone; None for others."""
        reference = self._known.get(id(tensor))
        if not isinstance(reference, RecordedValue):
            return None
        needed_numbers, calls = {reference.number}, []
        for call in reversed(self.recording.calls):
            if not touches(self.recording, call, needed_numbers):
                continue
            if not call.own or call.held:
                return None
            calls.append(call)
            needed_numbers |= call.takes
        if min(needed_numbers) < self.recording.inputs:
            return None
        values: dict[int, Tensor] = {}
        with unset_fake_temporarily(), without_torch_function(), torch.no_grad():
            for call in reversed(calls):
                result = call.what(*filled(call.args, values, {}, 0, None), **filled(call.kwargs, values, {}, 0, None))
                values.update(zip(call.gives, tensors_of(result), strict=True))
        return values[reference.number]


def _node(tensor: Tensor) -> str:
    return type(tensor.grad_fn).__name__ if tensor.grad_fn is not None else ""


def _memory(tensor: Tensor) -> int:
    return storage_identity(tensor)


def _versions(value: object) -> dict[int, int]:
    return {id(tensor): times_written(tensor) for tensor in tensors_of(value)}


def _cast() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def _with_known_numbers(numbers: Callable[[Tensor], bool]) -> contextlib.AbstractContextManager[None]:
    """Makes `transformers` read the numbers that are known, as it does in a training."""
    if "transformers" not in sys.modules:
        return contextlib.nullcontext()
    from dslc.runtime.model.transformers_model import treat_as_known

    return treat_as_known(numbers)


# ---------------------------------------------------------------------------------------------------------- attributes


class _Attributes:
    """The tensors that modules keep as plain attributes, which a recording takes as constants: their numbers are equal
    in each step. One that shares memory with a parameter or buffer, or has a gradient, is none. `fake` is the mode of
    the recording, in which a tensor with numbers has another that stands for it.
    """

    def __init__(self, model: nn.Module, fake: FakeTensorMode) -> None:
        self._kept: list[Tensor] = []  # alive, so that no other tensor has their identity
        self._names: dict[int, str] = {}  # by a tensor, and by its memory
        self._memory: dict[int, str] = {}
        self._faults: dict[int, str] = {}
        owners: dict[int, str] = {}
        for path, module in model.named_modules():
            for name, tensor in (*own_parameters(module).items(), *own_buffers(module).items()):
                if tensor is not None:
                    self._kept.append(tensor)
                    owners.setdefault(storage_identity(tensor), full(ModuleTensor(path, name)))
        registered = {id(tensor) for tensor in self._kept}
        for path, module in model.named_modules():
            for name, tensor in attribute_tensors(module):
                if id(tensor) in registered:
                    continue
                place = full(ModuleTensor(path, name))
                self._kept.append(tensor)
                self._names[id(tensor)] = place
                attribute = f"`{place}`, a plain attribute,"
                if tensor.layout is not torch.strided:
                    self._faults[id(tensor)] = f"{attribute} is no array of numbers: make it in `forward`, of buffers"
                    continue
                owner = owners.get(storage_identity(tensor))
                if owner is not None:
                    self._faults[id(tensor)] = f"{attribute} is a view of `{owner}`: take it in `forward`"
                elif tensor.requires_grad:
                    self._faults[id(tensor)] = f"{attribute} has a gradient: compute it in `forward`"
                else:
                    self._kept.append(fake.from_tensor(tensor))
                    self._memory |= {storage_identity(copy): place for copy in self._kept[-2:]}

    def name_of(self, tensor: Tensor) -> str:
        """Returns the name of the attribute whose memory this is; "" for none."""
        return self._memory.get(storage_identity(tensor), "")

    def fault(self, tensor: Tensor, model: nn.Module) -> str:
        """Returns why a tensor that no torch function has returned is no constant; "" if it is one."""
        if id(tensor) in self._names:
            return self._faults.get(id(tensor), "")
        if getattr(tensor, "fake_mode", None) is None:
            return ""
        for path, module in model.named_modules():
            for name, attribute_tensor in attribute_tensors(module):
                if attribute_tensor is tensor:
                    place = full(ModuleTensor(path, name))
                    return f"it uses the tensor of an earlier forward pass that it keeps in `{place}`"
        return (
            f"it uses a tensor of shape {tuple(tensor.shape)} that no torch function has returned, and no module keeps"
        )


# ------------------------------------------------------------------------------------------------ lines of the user's


def _line() -> str:
    """Returns the line of the user's own code that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        if line := _named(frame.f_code.co_filename, frame.f_lineno):
            return line
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _line_of(error: BaseException) -> str:
    import traceback

    frames = [_named(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    return next((line for line in reversed(frames) if line), "")


def _named(file: str, line: int) -> str:
    return f"{os.path.basename(file)}, line {line}" if is_users(file) else ""
