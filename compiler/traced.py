"""A module run with shapes in place of numbers: what each of its layers takes, gives, holds and costs.

Model: the module is cut into layers. A *block* is an element of an `nn.ModuleList` or `nn.Sequential` that holds two or
more of its class, each with parameters and modules of its own; of blocks within blocks the outermost counts, but what
`_no_split_modules` names (transformers) comes first. Other modules are layers as far up the tree as they hold no block;
what is called in between, and parameters that belong to no layer or are used outside of theirs, are the root's, whose
name is empty. Layers are in the order of their first call.

The forward pass runs on tensors without memory that call themselves the CPU's (torch's FakeTensorMode, which is the
meta device under the name of another): the same kernels are chosen as on a CPU, autocast included. A batch of two gives
the FLOPs; kept bytes are the difference that two samples more make, so that what does not grow with the batch is left
out. Work of the backward pass is its layer's by the order in which autograd's nodes were made.

Contract: the conventions of `LayerNode`; each piece of memory counts once, at the first layer that keeps it.

Limits: what is traced is one path through the module. Control flow that depends on numbers cannot be followed, and is
an error; that which depends on anything else may take other paths in training. Of what a module holds back by itself
for its backward pass (`torch.utils.checkpoint` its inputs) nothing is seen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from dslc.compiler.facts import DType, LayerFacts, ModelFacts, TensorFact

if TYPE_CHECKING:
    import torch
    from torch import nn

SMALL, LARGE = 2, 4  # samples; one alone would stop batch norm


class TraceError(Exception):
    """A user's function that cannot be used, in one line. The exception behind it is its `__cause__`."""


def trace_model(make: Callable[[], Any], input: TensorFact, *, low: bool = False) -> ModelFacts:
    """What the module that `make()` gives is made of, for a sample `input`.

    `low`: the job runs in 16 bits, so that a module which fails under autocast is at fault; otherwise its bytes in
    float32 stand for those.
    """
    import torch
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
    )

    # What a module holds besides its parameters and buffers may be real.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    model = _made(make, fake)
    cut = _Cut(model)
    first = _Pass(model, cut, fake, input, SMALL)
    try:
        output = first.forward()
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise TraceError(
            f"its forward reads numbers out of tensors (`{error.func}`), and here they have none"
        ) from error
    _check(output)
    first.backward(output)
    grown = _grown(first, _forward(model, cut, fake, input, LARGE))
    try:
        halves = [_forward(model, cut, fake, input, samples, low=True) for samples in (SMALL, LARGE)]
        grown_low = _grown(*halves)
    except RuntimeError as error:
        if low:
            raise TraceError(f"under autocast its forward fails: {str(error).strip().split(chr(10))[0]}") from error
        grown_low = grown
    named = list(model.named_parameters())
    return ModelFacts(
        parameters=tuple((name, tuple(p.shape), p.requires_grad) for name, p in named),
        buffers=tuple((name, tuple(b.shape), _name(b.dtype)) for name, b in model.named_buffers()),
        ties=_ties(model),
        layers=_layers(model, cut, first, grown, grown_low),
        output=fact(output, SMALL),
        batch_norm=any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in model.modules()),
        noise=first.noise,
        unused=tuple(name for name, p in named if p.requires_grad and p.grad is None),
        without_reset=tuple(
            path
            for path, module in model.named_modules()
            if any(p is not None for p in module._parameters.values()) and not hasattr(module, "reset_parameters")
        ),
        vocab=first.vocab,
    )


def seen(dtype: torch.dtype) -> DType:
    """The dtype in which the model sees numbers of this one: whole numbers as int64, others as float32."""
    return "float32" if dtype.is_floating_point else "int64"


def fact(tensor: torch.Tensor, samples: int) -> TensorFact:
    """One sample of a batch, also of one that is the same for all; of a tensor that is no batch, the whole."""
    shape = tuple(tensor.shape)
    return TensorFact(shape=shape[1:] if shape[:1] in ((samples,), (1,)) else shape, dtype=seen(tensor.dtype))


# --------------------------------------------------------------------------------------------------- the module


def _made(make: Callable[[], Any], fake: Any) -> nn.Module:
    """The module without memory; one that cannot be built so is built on the CPU and emptied."""
    import torch

    with fake:
        try:
            made = make()
        except (NotImplementedError, RuntimeError, ValueError, TypeError):
            made = None
    if made is None:
        made = make()
    if not isinstance(made, torch.nn.Module):
        raise TraceError(f"it returns a `{type(made).__name__}`, not a `torch.nn.Module`")
    _empty(made, fake)
    return made


def _empty(model: nn.Module, fake: Any) -> None:
    """Puts tensors of the fake CPU in the place of real ones and of those on other devices; what is tied stays tied."""
    import torch

    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or (getattr(tensor, "fake_mode", None) is fake and tensor.device.type == "cpu"):
                    continue
                if id(tensor) not in made:
                    with fake:
                        new = torch.empty(tensor.shape, dtype=tensor.dtype)
                    trains = tensor.requires_grad
                    made[id(tensor)] = torch.nn.Parameter(new, trains) if tensors is module._parameters else new
                tensors[name] = made[id(tensor)]  # type: ignore[assignment]


def _ties(model: nn.Module) -> tuple[tuple[str, str], ...]:
    first: dict[int, str] = {}
    named = list(model.named_parameters(remove_duplicate=False))
    return tuple((name, first[id(p)]) for name, p in named if first.setdefault(id(p), name) != name)


class _Cut:
    """The layers of a module by path, and which of them are blocks."""

    def __init__(self, model: nn.Module) -> None:
        self.blocks = _blocks(model)
        self.layers: dict[str, nn.Module] = {}
        self._met: set[int] = set()
        self._split("", model)
        self._owners = {name: path for path, module in self.layers.items() for name in _names(path, module)}

    def owner(self, name: str) -> str:
        """The layer that a parameter or buffer belongs to; "" for the root."""
        return self._owners.get(name, "")

    def _split(self, path: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            full = f"{path}.{name}" if path else name
            if id(child) in self._met:
                continue
            self._met.add(id(child))
            inside = any(block.startswith(full + ".") for block in self.blocks)
            if full not in self.blocks and (inside or _is_plain(child) or _is_wrapper(child)):
                self._split(full, child)
            else:
                self.layers[full] = child


def _names(path: str, module: nn.Module) -> list[str]:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return [f"{path}.{name}" for name, _ in named]


def _is_plain(module: nn.Module) -> bool:
    """A container of torch's own, which adds nothing to what it holds."""
    import torch

    return type(module) in (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)


def _is_wrapper(module: nn.Module) -> bool:
    children = list(module.children())
    return len(children) == 1 and not module._parameters and any(True for _ in children[0].children())


def _blocks(model: nn.Module) -> set[str]:
    import torch

    modules = dict(model.named_modules())
    plain = {path for path, module in modules.items() if _is_plain(module)}
    named = set(getattr(model, "_no_split_modules", None) or ())
    given, alike = [], []
    for path, module in modules.items():
        if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential):
            children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
            given += [name for name, child in children if type(child).__name__ in named]
            alike += _repeated(children)
    # A plain Sequential of blocks is a list of them rather than a block.
    alike = [p for p in alike if not (p in plain and any(_within(q, p) for q in alike))]
    alike = [p for p in alike if not any(_within(p, q) or _within(q, p) for q in given)]
    return {p for paths in (given, alike) for p in paths if not any(_within(p, q) for q in paths)}


def _repeated(modules: list[tuple[str, nn.Module]]) -> list[str]:
    """Those that hold parameters and modules and of whose kind there are two or more."""
    kinds: dict[Any, list[str]] = defaultdict(list)
    for path, module in modules:
        composed = any(True for _ in module.children()) or not type(module).__module__.startswith("torch.nn")
        if composed and any(True for _ in module.parameters()):
            kinds[_kind(module)].append(path)
    return [path for paths in kinds.values() if len(paths) > 1 for path in paths]


def _kind(module: nn.Module) -> Any:
    """Its class; of a plain container, also those of its parts."""
    return (type(module), *(_kind(child) for child in module.children())) if _is_plain(module) else type(module)


def _within(path: str, other: str) -> bool:
    return path.startswith(other + ".")


# ----------------------------------------------------------------------------------------------------- one pass


def _forward(model: nn.Module, cut: _Cut, fake: Any, input: TensorFact, samples: int, low: bool = False) -> _Pass:
    made = _Pass(model, cut, fake, input, samples, low)
    made.forward()
    return made


class _Pass:
    """One run of the module. What is counted is by the layer's path."""

    def __init__(
        self, model: nn.Module, cut: _Cut, fake: Any, input: TensorFact, samples: int, low: bool = False
    ) -> None:
        import torch

        self.model, self.cut, self.fake, self.samples, self.low = model, cut, fake, samples, low
        with fake:
            self.input = torch.empty((samples, *input.shape), dtype=getattr(torch, input.dtype))
        self.flops: dict[str, int] = defaultdict(int)
        self.flops_back: dict[str, int] = defaultdict(int)
        self.saved: dict[str, int] = defaultdict(int)
        self.chosen: dict[str, int] = defaultdict(int)  # bytes under selective recomputation: input and products
        self.inputs: dict[str, TensorFact] = {}
        self.outputs: dict[str, TensorFact] = {}
        self.order: list[str] = []
        self.astray: set[str] = set()  # parameters that are used outside of their layer
        self.noise = False
        self.vocab: int | None = None
        self._inside: list[str] = []
        self._marks: list[tuple[int, str]] = []  # from which of autograd's nodes on a layer was at work
        self._going_back = False
        self._alive: list[torch.Tensor] = []  # so that no storage is freed and its identity used again
        self._entered: set[int] = set()  # what blocks were given
        self._users: dict[int, tuple[str, set[str]]] = {}  # by storage: a parameter, and the layers it belongs to
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._users.setdefault(_storage(parameter), (name, set()))[1].add(cut.owner(name))
        held = [*model.parameters(), *model.buffers(), self.input]
        self._own = {_storage(tensor) for tensor in held}
        self._held = set(self._own)
        self._formulas = _formulas()

    def forward(self) -> Any:
        import torch

        with ExitStack() as around:
            around.enter_context(self._hooks())
            around.enter_context(self.fake)
            around.enter_context(self._watching())
            around.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor))
            around.enter_context(torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.low))
            self._mark()
            return self.model(self.input)

    def backward(self, output: torch.Tensor) -> None:
        if not output.requires_grad:
            return
        self._going_back = True
        with self.fake, self._watching():
            output.sum().backward()

    # ------------------------------------------------------------------------------------------- where we are

    @property
    def now(self) -> str:
        """The layer at work: of one that calls another the outer, which is what would run again."""
        return self._inside[0] if self._inside else ""

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        with ExitStack() as hooks:
            for path, module in self.cut.layers.items():
                enter = module.register_forward_pre_hook(self._enter(path), with_kwargs=True)
                hooks.callback(enter.remove)
                hooks.callback(module.register_forward_hook(self._leave(path)).remove)
            yield

    def _enter(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._inside.append(path)
            if len(self._inside) > 1:
                return
            tensors = _tensors((args, kwargs))
            self._note(path)
            if tensors:
                batches = [t for t in tensors if t.shape[:1] == (self.samples,)]
                self.inputs.setdefault(path, fact((batches or tensors)[0], self.samples))
            for tensor in tensors:
                if (key := _storage(tensor)) not in self._entered | self._own:
                    self._entered.add(key)
                    self._alive.append(tensor)
                    self.chosen[path] += tensor.untyped_storage().nbytes()
            self._mark()

        return hook

    def _leave(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._inside.pop()
            if not self._inside and (tensors := _tensors(output)):
                self.outputs.setdefault(path, fact(tensors[0], self.samples))
            self._mark()

        return hook

    def _mark(self) -> None:
        import torch

        self._marks.append((torch.autograd._get_sequence_nr(), self.now))

    def _note(self, path: str) -> None:
        if path not in self.order:
            self.order.append(path)

    # --------------------------------------------------------------------------------------- what is counted

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if (key := _storage(tensor)) not in self._held:
            self._held.add(key)
            self._alive.append(tensor)
            self._note(self.now)
            self.saved[self.now] += tensor.untyped_storage().nbytes()
        return tensor

    @contextmanager
    def _watching(self) -> Iterator[None]:
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(_, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                if func is not torch.ops.prim.device.default:
                    self._operation(func, args, kwargs or {}, result)
                return result

        with Watch():
            yield

    def _operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        formula = self._formulas.get(func._overloadpacket)
        if self._going_back:
            if formula is not None:
                self.flops_back[self._of_node()] += int(formula(*args, **kwargs, out_val=result))
            return
        if formula is not None:
            self._note(self.now)
            self.flops[self.now] += int(formula(*args, **kwargs, out_val=result))
            self.chosen[self.now] += sum(t.numel() * t.element_size() for t in _tensors(result))
        for tensor in _tensors((args, kwargs)):
            name, layers = self._users.get(_storage(tensor), ("", {self.now}))
            if self.now not in layers:
                self.astray.add(name)
        self._look(func, args)

    def _look(self, func: Any, args: Any) -> None:
        """Noise, and embeddings that the input's own numbers are looked up in."""
        import torch

        aten = torch.ops.aten
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in str(func):
            self.noise = True
        if func is aten.embedding.default and _storage(args[1]) == _storage(self.input):
            rows = args[0].shape[0]
            self.vocab = rows if self.vocab is None else min(self.vocab, rows)

    def _of_node(self) -> str:
        import torch

        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        number = node._sequence_nr()
        return self._marks[max(0, bisect_right(self._marks, number, key=lambda mark: mark[0]) - 1)][1]


def _formulas() -> dict[Any, Callable[..., int]]:
    """FLOPs by operation: torch's own, and those of the CPU's kernels, which torch lacks."""
    import torch
    from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_flop_count

    def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query.shape, key.shape, value.shape))

    def attention_back(_grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return 2 * attention(query, key, value)

    def convolution_back(grad: Any, x: Any, w: Any, *rest: Any, **_: Any) -> int:
        # Each gradient is as much as the forward; torch takes a grouped one's for weights as if it were not grouped.
        transposed, wanted = rest[4], rest[7]
        each = conv_flop_count(list(x.shape), list(w.shape), list(grad.shape), transposed=transposed)
        return int(each) * (int(wanted[0]) + int(wanted[1]))

    def recurrent(x: Any, w: Any, u: Any, *_: Any, **__: Any) -> int:
        return 2 * int(x.shape[0] * x.shape[1]) * int(w.numel() + u.numel())

    def recurrent_back(*args: Any, **kwargs: Any) -> int:
        return 2 * recurrent(*args)

    aten = torch.ops.aten
    return flop_registry | {
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_back,
        aten.convolution_backward: convolution_back,
        aten.mkldnn_rnn_layer: recurrent,
        aten.mkldnn_rnn_layer_backward: recurrent_back,
    }


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(value: Any) -> list[torch.Tensor]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


# ------------------------------------------------------------------------------------------------------ the facts


def _check(output: Any) -> None:
    import torch

    if not isinstance(output, torch.Tensor):
        raise TraceError(f"its forward returns a `{type(output).__name__}`, not a tensor")
    if output.shape[:1] != (SMALL,):
        raise TraceError(f"{SMALL} samples go in, and the output's shape is {tuple(output.shape)}")


def _grown(small: _Pass, large: _Pass) -> dict[str, tuple[int, int]]:
    """Bytes that one sample more adds to each layer: all that is kept, and under selective recomputation."""
    more = LARGE - SMALL
    return {
        path: ((large.saved[path] - small.saved[path]) // more, (large.chosen[path] - small.chosen[path]) // more)
        for path in large.order
    }


def _layers(
    model: nn.Module,
    cut: _Cut,
    run: _Pass,
    grown: dict[str, tuple[int, int]],
    grown_low: dict[str, tuple[int, int]],
) -> tuple[LayerFacts, ...]:
    parameters: dict[str, list[str]] = defaultdict(list)
    for name, _ in model.named_parameters(remove_duplicate=False):
        parameters[_place(cut, run, name)].append(name)
    buffers: dict[str, list[str]] = defaultdict(list)
    for name, _ in model.named_buffers():
        buffers[_place(cut, run, name)].append(name)
    order = run.order if "" in run.order or not (parameters[""] or buffers[""]) else [*run.order, ""]
    made = []
    for path in order:
        block = path in cut.blocks
        saved, chosen = grown.get(path, (0, 0))
        saved_low, chosen_low = grown_low.get(path, (0, 0))
        layer = LayerFacts(
            name=path,
            kind=type(cut.layers[path] if path else model).__name__,
            block=block,
            parameters=tuple(parameters[path]),
            buffers=tuple(buffers[path]),
            input=run.inputs.get(path),
            output=run.outputs.get(path),
            forward_flops=run.flops[path] // SMALL,
            backward_flops=run.flops_back[path] // SMALL,
            saved=saved,
            saved_low=saved_low,
            saved_selective=chosen if block else saved,
            saved_selective_low=chosen_low if block else saved_low,
        )
        nothing = not (layer.parameters or layer.buffers or layer.forward_flops or layer.saved or layer.saved_low)
        if path or not nothing:
            made.append(layer)
    return tuple(made)


def _place(cut: _Cut, run: _Pass, name: str) -> str:
    """The layer of a parameter or buffer: its own, unless that was never called or others use it too."""
    path = cut.owner(name)
    return path if path in run.order and name not in run.astray else ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
