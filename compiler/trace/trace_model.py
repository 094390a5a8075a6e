"""Runs a module on shapes instead of numbers, and finds each layer's inputs, outputs, parameters and costs.

Model: the module is cut into layers (cut.py). Calls between layers, and parameters that belong to no layer or are used
outside of theirs, belong to the root, whose name is empty. Layers are in the order of their first call. The module is
run without memory (run.py), with two samples and with four. The first run gives the FLOPs, the difference the saved
bytes per sample; so anything that does not grow with the batch is left out. Working memory is in memory.py.

Contract: the conventions of `LayerNode`; each piece of memory counts once, at the first layer that keeps it.

Limits: tracing follows one path through the module. Where the path depends on numbers, the module is run for real on a
few samples. Other samples may take other paths, as they may where control flow depends on anything else. Memory that a
module saves by itself for its backward pass (`torch.utils.checkpoint` its inputs) is not seen.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import nn

from dslc.compiler.ir.memory import LayerMemory, Working
from dslc.compiler.ir.module_facts import LayerFacts, ModelFacts
from dslc.compiler.ir.network_facts import CodePlace, NetworkFacts
from dslc.compiler.ir.tensors import DType, TensorFact
from dslc.compiler.trace.batch import LARGE, SMALL, Example, Outputs, grown, without_numbers
from dslc.compiler.trace.code_place import HostDraws, line_of, place_of
from dslc.compiler.trace.compiled import kept_by_blocks
from dslc.compiler.trace.cut import ModuleCut, dense_outputs, expert_calls, head_among, normalised_numbers
from dslc.compiler.trace.draws import Draw, classify, draw_at, is_draw, running_modules
from dslc.compiler.trace.fake_tensor_mode import FakeTensorMode
from dslc.compiler.trace.flops import check_dtypes, flops_of, is_of_cudnn
from dslc.compiler.trace.instantiate import (
    NOTHING,
    TraceError,
    as_module,
    dtype_name,
    facts_of_tensors,
    frozen_parameters,
    made_without_memory,
    mode_without_memory,
)
from dslc.compiler.trace.memory import measure
from dslc.compiler.trace.private_torch import (
    AnyBatchNorm,
    Arguments,
    DataDependentOutputException,
    DynamicOutputShapeException,
    Operator,
    Options,
    own_buffers,
    own_parameters,
)
from dslc.compiler.trace.reuse.block_reuse import BlockReuse
from dslc.compiler.trace.reuse.repeated_blocks import find_repeated_blocks
from dslc.compiler.trace.run import Run, TracedModule, storage, storage_bytes, tensors_of, total_of, written_tensors
from dslc.compiler.trace.sharding.context_parallel_check import Asked, with_pieces
from dslc.compiler.trace.sharding.context_parallel_check import Loss as CountedLoss
from dslc.compiler.trace.sharding.sample_order import with_traced_orders
from dslc.compiler.trace.sharding.tensor_parallel_check import with_shares

REAL = 8 << 30  # bytes of parameters with which a module is made and run for real, at most

Loss: TypeAlias = "Callable[..., torch.Tensor]"


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """How a module is traced: the arguments of `trace_model`."""

    loss: Loss | None
    outputs: Outputs | None
    low: bool
    compile: bool
    split: bool
    tensor: int
    tensor_plan: tuple[str, ...] | None
    skipped: BlockReuse
    frozen: tuple[str, ...]


def trace_model(
    make: Callable[[], object],
    input: TensorFact | Example,
    *,
    loss: Loss | None = None,
    counted_loss: CountedLoss | None = None,
    outputs: Outputs | None = None,
    low: bool = False,
    compile: bool = False,
    split: bool = False,
    tensor: int = 1,
    tensor_plan: tuple[str, ...] | None = None,
    reuse: BlockReuse | None = None,
    context: int = 1,
    ask: Asked = lambda facts: nullcontext(),
    frozen: tuple[str, ...] = (),
) -> ModelFacts:
    """Returns the facts of the module that `make()` makes, for a sample `input`.

    A run without memory has no numbers. A module that looks at numbers is made and run for real, if its parameters take
    no more than `REAL` bytes; `looks` then says where it does.

    `loss`, of an output and a target of the example, is the loss, where only its gradient tells which parameters are
    used. `counted_loss` is a loss that counts by itself, over pieces of sequences. `outputs` takes outputs like the
    module's. `low`: the job runs in 16 bits, so that a module that fails under autocast is at fault; otherwise its
    float32 bytes stand for the bytes under autocast. `compile`: torch compiles its blocks, which then keep less.
    `split`: the job's schedule splits the backward pass, whose halves are measured then. `tensor`: ranks of a tensor
    axis, over which `tensor_plan`, or a plan of the module's own, cuts it. With `reuse`, blocks that are alike are
    traced once; `reuse` then has the skipped blocks. `context`: ranks of a context axis. `frozen`: patterns of
    parameters that the job freezes, so that less is kept; all other facts describe the module as it is made. `ask`
    makes libraries read numbers that are known (context_parallel_check.py).
    """
    fake = mode_without_memory()
    traced = _traced_module(made_without_memory(make, fake), fake, input)
    reuse = reuse or BlockReuse(wanted=False)
    settings = _Settings(
        loss=loss,
        outputs=outputs,
        low=low,
        compile=compile,
        split=split,
        tensor=tensor,
        tensor_plan=tensor_plan,
        skipped=reuse,
        frozen=frozen,
    )
    try:
        if reuse.wanted:
            try:
                with frozen_parameters(traced.model, frozen):
                    reuse.middle, changed = find_repeated_blocks(traced)
            except Exception:  # any kind: what fails there is raised again, and told, where each block is traced
                changed = True
            if changed:
                traced = _traced_module(made_without_memory(make, fake), fake, input)
        if reuse.middle is not None:
            try:
                with reuse.skip_blocks(traced.model):
                    return _facts_of(traced, settings)
            except Exception:  # any kind: they are not alike, or it is raised again without leaving them out
                reuse.middle = None
                traced = _traced_module(made_without_memory(make, fake), fake, input)
        facts = _facts_of(traced, settings)
        if context > 1 and not (isinstance(input, TensorFact) and facts.structured):
            buffers = functools.partial(_buffers, traced.model, make)
            facts = with_pieces(facts, traced, context, ask, buffers, counted_loss)
        return facts
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        if _parameter_bytes(traced.model) > REAL:
            message = f"its forward reads numbers out of tensors (`{error.func}`), and here they have no values"
            raise TraceError(message, remedy="it is too large to be made and run for real beforehand") from error
        line = line_of(error)
        looks = f"`{error.func.overloadpacket.__name__}`" + (f", {line}" if line else "")
    for_real = replace(settings, compile=False, tensor=1, tensor_plan=None, skipped=BlockReuse(wanted=False))
    return replace(_facts_of(_traced_module(as_module(make()), None, input), for_real), looks=looks)


def _traced_module(model: nn.Module, fake: FakeTensorMode | None, input: TensorFact | Example) -> TracedModule:
    return TracedModule(model, ModuleCut(model), fake, input)


def _parameter_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _buffers(model: nn.Module, make: Callable[[], object]) -> dict[str, torch.Tensor]:
    """Returns the buffers of the module with their numbers, if it can be made for real."""
    if _parameter_bytes(model) > REAL:
        return {}
    return dict(as_module(make()).named_buffers())


def _facts_of(traced_module: TracedModule, settings: _Settings) -> ModelFacts:
    """Runs the module and returns its facts."""
    model, reuse = traced_module.model, settings.skipped
    traced = replace(traced_module, cut=reuse.remaining(traced_module.cut))
    first_count = _Count(traced)
    first_count.checked = ("float32", "bfloat16", "float16") if settings.low else ()  # which autocast makes one
    draws, trained = HostDraws(model), {name: p.requires_grad for name, p in model.named_parameters()}
    with (
        normalised_numbers(model, SMALL) as values,
        dense_outputs(model, first_count.read) as dense,
        _writing(model, first_count) as (written_names, parameters_written),
        draws.watch(),
        expert_calls(model, SMALL) as experts,
    ):
        output = first_count.forward()
    _check_parameters(model, trained)
    if isinstance(traced.input, TensorFact) and isinstance(output, torch.Tensor):
        _check(output)
    unused = _run_backward(first_count, output, settings.loss, trained)
    larger, large_draws, float32, autocast = _memories(first_count, output, trained, settings)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained[name])  # `forward` may freeze some
    _fill_skipped(first_count, float32, autocast, reuse)
    noise = with_traced_orders(classify(first_count.draws, large_draws, SMALL, LARGE), first_count.draws, traced)
    if "draw_dims" in noise:
        noise["draw_dims"] = tuple(
            reuse.inserted(
                [*noise["draw_dims"]], lambda draw: draw.module, lambda draw, path: replace(draw, module=path)
            )
        )
    facts = replace(
        _facts_of_module(model),
        layers=_layers(traced_module.cut, first_count, float32, autocast),
        output=fact(output, SMALL) if isinstance(output, torch.Tensor) else grown(output, larger).flat,
        structured=not isinstance(output, torch.Tensor),
        head=head_among(dense, output, first_count.read),
        batch_norm_values=min(values, default=None),
        noise=bool(first_count.draws),
        experts=tuple(experts),
        changed=tuple(written_names),
        unused=tuple(reuse.shared_parameters(unused)),
        vocab=first_count.vocab,
        network=NetworkFacts(
            **noise,
            host_draws=_place_of_draw(traced) if draws.source else None,
            draws_from=draws.source,
            draws_globally=draws.is_global,
            written=tuple(parameters_written),
            untracked=tuple(path for path, module in _batch_norms(model).items() if module.running_mean is None),
        ),
    )
    if settings.tensor == 1 or traced.mode is None:
        return facts
    return with_shares(facts, traced, settings.tensor, settings.tensor_plan, reuse)


def _fill_skipped(
    count: _Count, float32: dict[str, LayerMemory], autocast: dict[str, LayerMemory], reuse: BlockReuse
) -> None:
    """Gives the modules that were skipped the figures of those that ran in their place."""
    sums = count.flops, count.flops_back, count.operations, count.multiplies
    figures = *sums, count.inputs, count.outputs, float32, autocast
    reuse.check(*figures)
    reuse.fill(*figures)
    count.order, count.astray = reuse.named(count.order), set(reuse.named(sorted(count.astray)))


def _memories(
    first_count: _Count, output: object, trained: Mapping[str, bool], settings: _Settings
) -> tuple[object, list[Draw], dict[str, LayerMemory], dict[str, LayerMemory]]:
    """Runs the module with its frozen parameters; returns the output and the draws for the larger batch, and the memory
    of each layer in float32 and under autocast. FLOPs of the backward pass are then of parameters that train.
    """
    traced = first_count.traced
    with frozen_parameters(traced.model, settings.frozen) as some:
        counts = first_count
        if some:
            counts = _Count(traced)
            _run_backward(counts, counts.forward(), settings.loss, trained)
            first_count.flops_back = counts.flops_back
        second = _Count(traced, LARGE)
        larger = second.forward()
        if settings.outputs is not None and (not isinstance(output, torch.Tensor) or isinstance(traced.input, Example)):
            settings.outputs.write(output, larger)
        float32 = _memory(counts, second, settings)
        try:
            one, large_count = (_counted_in_16_bits(traced, samples) for samples in (SMALL, LARGE))
            autocast = _memory(one, large_count, settings)
        except RuntimeError as error:
            if settings.low:
                raise TraceError(f"under autocast its forward fails: {str(error).strip().split(chr(10))[0]}") from error
            autocast = {path: replace(memory, working=None) for path, memory in float32.items()}
    return larger, second.draws, float32, autocast


def _counted_in_16_bits(traced: TracedModule, samples: int) -> _Count:
    run = _Count(traced, samples, low=True)
    run.forward()
    return run


def _batch_norms(model: nn.Module) -> dict[str, AnyBatchNorm]:
    return {path: module for path, module in model.named_modules() if isinstance(module, AnyBatchNorm)}


def _facts_of_module(model: nn.Module) -> ModelFacts:
    """Returns the facts that the module itself tells, after a forward pass, which may put some of it
    into evaluation mode.
    """
    norms = _batch_norms(model)
    return replace(
        facts_of_tensors(model),
        batch_norm=any(module.training for module in norms.values()),
        still=tuple(path for path, module in norms.items() if not module.training),
        dtypes=tuple((name, dtype_name(p.dtype)) for name, p in model.named_parameters() if p.dtype != torch.float32),
        without_reset=tuple(
            path
            for path, module in model.named_modules()
            if any(tensor is not None for tensor in (*own_parameters(module).values(), *own_buffers(module).values()))
            and not hasattr(module, "reset_parameters")
        ),
    )


def _place_of_draw(traced: TracedModule) -> CodePlace:
    """Returns the place of the first random number that a forward pass draws without torch."""
    with HostDraws(traced.model).line_of() as places:
        _Count(traced).forward()
    return places[0] if places else place_of(None, {}, traced.model)


def _run_backward(run: _Count, output: object, loss: Loss | None, trained: Mapping[str, bool]) -> list[str]:
    """Runs backward from a module's output, or from the loss of it; returns the `trained` parameters that get no
    gradient.
    """
    total = total_of(output)
    if loss is not None and isinstance(run.traced.input, Example):
        with run.fake:
            total = loss(output, without_numbers(run.traced.input.target(run.samples), run.traced.mode))
    if total is not None and total.requires_grad:
        run.backward(total)
    unused = [name for name, p in run.model.named_parameters() if trained[name] and p.grad is None]
    for parameter in run.model.parameters():
        parameter.grad = None
    return unused


@contextmanager
def _writing(model: nn.Module, run: _Count) -> Iterator[tuple[list[str], list[str]]]:
    """Yields the buffers, without batch norm's statistics, and the parameters that the forward pass inside writes in
    place or replaces.
    """

    def storages() -> tuple[dict[str, int], dict[str, int]]:
        buffers = {
            f"{path}.{name}".lstrip("."): storage(buffer)
            for path, module in model.named_modules()
            if not isinstance(module, AnyBatchNorm)
            for name, buffer in own_buffers(module).items()
            if buffer is not None
        }
        return buffers, {name: storage(parameter) for name, parameter in model.named_parameters()}

    names: tuple[list[str], list[str]] = ([], [])
    storages_before = storages()
    yield names
    for names_written, old, new in zip(names, storages_before, storages(), strict=True):
        names_written += [
            name
            for name, storage_id in old.items()
            if storage_id in run.written or new.get(name, storage_id) != storage_id
        ]


def model_dtype(dtype: torch.dtype) -> DType:
    """Returns the dtype in which the model sees numbers of this one: integers as int64, others as float32."""
    return "float32" if dtype.is_floating_point else "int64"


def fact(tensor: torch.Tensor, samples: int) -> TensorFact:
    """Returns one sample of a batch, also if one sample stands for all; for a tensor that is no batch, the whole."""
    shape = tuple(tensor.shape)
    return TensorFact(shape=shape[1:] if shape[:1] in ((samples,), (1,)) else shape, dtype=model_dtype(tensor.dtype))


# ------------------------------------------------------------------------------------------------------ counting


class _Count(Run):
    """A run that counts FLOPs and saved bytes, by the layer's path."""

    def __init__(self, traced: TracedModule, samples: int = SMALL, low: bool = False) -> None:
        super().__init__(traced, samples, low)
        self.flops: dict[str, int] = defaultdict(int)
        self.flops_back: dict[str, int] = defaultdict(int)
        self.operations: dict[str, int] = defaultdict(int)  # but for views
        self.saved: dict[str, int] = defaultdict(int)
        self.saved_input: dict[str, int] = defaultdict(int)
        self.tail: dict[str, int] = defaultdict(int)  # the same after a layer's last operation with weights
        self.given: dict[str, int] = defaultdict(int)  # bytes of a layer's inputs
        self.full: dict[str, int] = defaultdict(int)  # bytes of a layer's inputs that no layer before keeps
        self.shared: dict[str, int] = defaultdict(int)  # of inputs that the block before keeps
        self.returned: dict[str, int] = defaultdict(int)  # bytes of a layer's output
        self.products: dict[str, int] = defaultdict(int)  # bytes of results of products and attention
        self.multiplies: dict[str, bool] = {}  # true for a layer with products other than convolutions
        self.inputs: dict[str, TensorFact] = {}
        self.outputs: dict[str, TensorFact] = {}
        self.order: list[str] = []
        self.astray: set[str] = set()  # parameters that are used outside of their layer
        self.checked: Collection[str] | None = None  # products of two dtypes fail, except of these
        self.draws: list[Draw] = []  # torch's random numbers
        self.running_modules: list[nn.Module] = []  # whose `forward` runs, the innermost last
        self.read: set[int] = set()  # memory that operations get
        self.written: set[int] = set()  # memory that operations write in place
        self.vocab: int | None = None
        self._alive: list[torch.Tensor] = []  # kept alive so that no storage's identity is used again
        self._entered: set[int] = set()  # memory of layers' inputs
        self._held = dict.fromkeys(self.own, "")  # memory that exists anyway, or that a layer keeps, with the layer
        self._inputs: set[int] = set()  # memory of blocks' inputs
        self._of_block: dict[int, int] = {}  # of the running layer: inputs that the block before keeps, and their bytes
        self._users: dict[int, tuple[str, set[str]]] = {}  # by storage: a parameter, and the layers it belongs to
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            self._users.setdefault(storage(parameter), (name, set()))[1].add(self.cut.owner(name))

    def forward(self) -> object:
        saving = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        with self.running(), saving, running_modules(self.model) as self.running_modules:
            return self.called()

    def enter_module(self, path: str, inputs: object) -> None:
        tensors = tensors_of(inputs)
        self._note(path)
        if tensors:
            batches = [t for t in tensors if t.shape[:1] == (self.samples,)]
            self.inputs.setdefault(path, fact((batches or tensors)[0], self.samples))
        for tensor in tensors:
            if (key := storage(tensor)) not in self._entered | self.own:
                self._entered.add(key)
                self._alive.append(tensor)
                self.given[path] += storage_bytes(tensor)
        self._note_kept_inputs(path, {storage(t): storage_bytes(t) for t in tensors})

    def _note_kept_inputs(self, path: str, sizes: dict[int, int]) -> None:
        """Counts the inputs that the layer keeps if it is recomputed, each piece of memory at the first block."""
        place = self.order.index(path)
        previous = self.order[place - 1] if place else ""
        self._of_block = {}
        for key, size in sizes.items():
            if key not in self._held:
                if key not in self._inputs:
                    self.full[path] += size
            elif previous in self.cut.blocks and self._held[key] == previous:
                self._of_block[key] = size
        if path in self.cut.blocks:
            self._inputs |= sizes.keys()
            self.shared[path] += sum(self._of_block.values())
            self._of_block = {}

    def leave_module(self, path: str, output: object) -> None:
        self._of_block = {}
        if tensors := tensors_of(output):
            self.outputs.setdefault(path, fact(tensors[0], self.samples))
            self.returned.setdefault(path, storage_bytes(tensors[0]))

    def operation(self, func: Operator, args: Arguments, kwargs: Options, result: object) -> None:
        flops = flops_of(func, args, kwargs, result)
        if self.going_back:
            if flops is not None:
                self.flops_back[self.of_node()] += flops
            return
        self.operations[self.now] += not (func.is_view or func.name() == "aten::_unsafe_view")
        if self.checked is not None:
            check_dtypes(func, args, self.now, self.checked)
        if flops is not None:
            self._note(self.now)
            self.flops[self.now] += flops
            self.multiplies[self.now] = self.multiplies.get(self.now, False) or not is_of_cudnn(func)
            self.products[self.now] += sum(t.numel() * t.element_size() for t in tensors_of(result))
        for tensor in tensors_of((args, kwargs)):
            self.read.add(storage(tensor))
            name, layers = self._users.get(storage(tensor), ("", {self.now}))
            if self.now not in layers:
                self.astray.add(name)
            if storage(tensor) in self.trained:
                self.tail[self.now] = 0
        self._look(func, args, kwargs, result)
        self.written.update(map(storage, written_tensors(func, args, kwargs)))

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if (key := storage(tensor)) in self._held:
            self.shared[self.now] += self._of_block.pop(key, 0)
        else:
            self._held[key] = self.now
            self._alive.append(tensor)
            self._note(self.now)
            size = storage_bytes(tensor)
            self.saved[self.now] += size
            self.tail[self.now] += size
            self.saved_input[self.now] += size if key in self._entered else 0
        return tensor

    def _look(self, func: Operator, args: Arguments, kwargs: Options, result: object) -> None:
        """Notes random operations, and embeddings that look up the input's own numbers."""

        aten = torch.ops.aten
        if is_draw(func):
            frame = sys._getframe(1)
            self.draws.append(draw_at(frame, self.model, self.running_modules, func, args, kwargs, result))
        is_single = isinstance(self.input, torch.Tensor)
        if is_single and func is aten.embedding.default and storage(args[1]) == storage(self.input):
            rows = args[0].shape[0]
            self.vocab = rows if self.vocab is None else min(self.vocab, rows)

    def _note(self, path: str) -> None:
        if path not in self.order:
            self.order.append(path)


# ------------------------------------------------------------------------------------------------------ the facts


def _check_parameters(model: nn.Module, trained: Mapping[str, bool]) -> None:
    """Raises TraceError if `forward` has made a parameter, or let one train; `trained` are those before it, by name."""
    for name, parameter in model.named_parameters():
        if name not in trained:
            raise TraceError(
                f"`forward` makes its parameter `{name}`, when the optimizer has its parameters already",
                "make it in `__init__`, or call the network once on a sample in the function that makes it",
            )
        if parameter.requires_grad and not trained[name]:
            raise TraceError(
                f"`forward` lets its parameter `{name}` train, when the optimizer has its parameters already",
                "call `requires_grad_(True)` in `__init__`: `forward` may freeze it",
            )


def _check(output: torch.Tensor) -> None:
    if output.shape[:1] != (SMALL,):
        one_number = "" if output.dim() else "if the network returns its loss, say so: `loss = own()`"
        raise TraceError(f"{SMALL} samples go in, and the output's shape is {tuple(output.shape)}", one_number)


def _memory(small: _Count, large: _Count, settings: _Settings) -> dict[str, LayerMemory]:
    """Returns the memory of each layer in the precision of two runs, with few samples and with more."""

    def grown(name: str) -> dict[str, int]:
        less, more = getattr(small, name), getattr(large, name)
        return {path: (more[path] - less[path]) // (LARGE - SMALL) for path in large.order}

    saved, gradient_sizes, products, inputs, tail = map(grown, ("saved", "given", "products", "saved_input", "tail"))
    full, shared, returned = map(grown, ("full", "shared", "returned"))
    working = measure(large, saved, gradient_sizes, tail if settings.split else None)
    selective = {path: full[path] + products[path] if path in large.cut.blocks else saved[path] for path in saved}
    if settings.compile:
        one, large_kept = (kept_by_blocks(run.traced, run.samples, run.low, run.saved) for run in (small, large))
        for path in one.keys() & large_kept.keys() & saved.keys():
            growth = (large_kept[path] - one[path]) // (LARGE - SMALL)
            if path in working:
                working[path] = _keeping(working[path], growth - saved[path])
            saved[path] = growth
    return {
        path: LayerMemory(
            saved=saved[path],
            selective=selective[path],
            saved_input=min(saved[path], inputs[path]),
            full=full[path],
            shared=shared[path],
            input=gradient_sizes[path],
            output=returned[path],
            working=working.get(path),
        )
        for path in saved
    }


def _keeping(working: Working, more: int) -> Working:
    """Returns the working memory of a layer that keeps `more` bytes more (or fewer) than it would by itself."""
    backward, on_cpu = (
        tuple(replace(moment, bytes=max(0, moment.bytes + more)) for moment in moments)
        for moments in (working.backward, working.on_cpu)
    )
    return replace(working, forward=max(0, working.forward + more), backward=backward, on_cpu=on_cpu)


def _layers(
    cut: ModuleCut, run: _Count, float32: dict[str, LayerMemory], autocast: dict[str, LayerMemory]
) -> tuple[LayerFacts, ...]:
    parameters: dict[str, list[str]] = defaultdict(list)
    for name, _ in run.model.named_parameters(remove_duplicate=False):
        parameters[_place(cut, run, name)].append(name)
    buffers: dict[str, list[str]] = defaultdict(list)
    for name, _ in run.model.named_buffers():
        buffers[_place(cut, run, name)].append(name)
    order = run.order if "" in run.order or not (parameters[""] or buffers[""]) else [*run.order, ""]
    layers = []
    for path in order:
        layer = LayerFacts(
            name=path,
            kind=type(cut.layers[path] if path else run.model).__name__,
            block=path in cut.blocks,
            parameters=tuple(parameters[path]),
            buffers=tuple(buffers[path]),
            input=run.inputs.get(path),
            output=run.outputs.get(path),
            forward_flops=run.flops[path] // SMALL,
            backward_flops=run.flops_back[path] // SMALL,
            float32=float32.get(path, NOTHING),
            autocast=autocast.get(path, NOTHING),
            multiplies=run.multiplies.get(path, False),
            operations=run.operations[path],
        )
        saved = layer.float32.saved or layer.autocast.saved
        if path or layer.parameters or layer.buffers or layer.forward_flops or saved:
            layers.append(layer)
    return tuple(layers)


def _place(cut: ModuleCut, run: _Count, name: str) -> str:
    """Returns the layer of a parameter or buffer: its own, unless that was never called or others use it too."""
    path = cut.owner(name)
    return path if path in run.order and name not in run.astray else ""
