"""`torch.compile`, module by module and in place.

Model: the module's `forward` is replaced, on the instance, by its compiled form, which torch makes at the first call.
`nn.Module.compile` would leave torch's own modules uncompiled; and the work of hooks, such as gathering parameters, is
better left outside. The loss is compiled by itself (model/losses.py).

Contract: names, parameters and hooks stay; results agree with the plain module within rounding. If the machine lacks a
tool that torch needs to compile, a CompileError before the first step names it.

Draws by sample (sample_draws.py): torch's compiler would draw by a generator of its own. Here each random operation of
a graph becomes an operator, `dslc::draw`, which names its layer and its number within the graph. It calls torch's own
operation, as uncompiled code does, in the pass over the micro-batch in which the graph began. Another operator,
`dslc::begin_draws`, notes that pass, so that the backward pass may draw again. Neither step nor sample are in the
graph: nothing is compiled anew for them. The names of layers are: equal blocks that draw are compiled one by one.

Mixtures of experts whose ranks exchange rows or tokens, or whose gradient depends on the global batch, run as they are,
and what is around them in their block is compiled.

Limits: code that torch cannot compile runs as it is, between compiled parts; but not in what is recomputed and draws by
sample, where torch ends the training. A second batch size (the last of an epoch, evaluation) is compiled once more, for
any size; on the tensor axis each size is compiled, as torch (2.13) has no dynamic sizes for DTensors. A chance that is
another number in each pass is compiled anew for each, until torch ends the training at `_VARIANTS`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.traceback import get_current_meta

from dslc.compiler.trace.private_torch import (
    compile_graph,
    compiler_settings,
    default_compile_cache,
    has_cpp_compiler,
    has_triton,
)
from dslc.runtime.model.experts.expert_modules import IS_COMPILABLE
from dslc.runtime.technique.sample_pass import (
    ACTIVE,
    LAYER,
    LAYERS,
    DrawingLayer,
    SamplePass,
    current_pass,
    is_by_sample,
)

_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_VARIANTS = 16  # variants of one module: training or not, with gradients or not, sizes of a batch


class CompileError(RuntimeError):
    """The machine lacks a tool that `train.compile` needs, or keeps compiled code where another user can write."""


def apply(
    modules: tuple[str, ...],
    model: nn.Module,
    device: torch.device,
    *,
    cut: bool = False,
) -> None:
    """Has torch compile these modules of `model`, which will run on `device`, at their first call; `cut`: the tensor
    axis cuts them. Raises CompileError.
    """
    if not modules:
        return
    keep_to_oneself()
    _expect_compiler(device)
    # Torch's limits count all modules that share a line of code; beyond them it runs modules uncompiled.
    limits = compiler_settings()
    limits.recompile_limit = max(limits.recompile_limit, _VARIANTS * len(modules))
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, 2 * limits.recompile_limit)
    limits.fail_on_recompile_limit_hit = True
    by_sample = any(map(is_by_sample, model.modules()))
    if by_sample:
        _draw_operators()
        # In what is recomputed a layer may say that it runs; the second pass has the layer's name in the graph.
        limits.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    for module in model.modules():
        if not getattr(module, IS_COMPILABLE, True):
            module.forward = torch.compiler.disable(module.forward)
    for name in modules:
        module = model.get_submodule(name)
        module.forward = torch.compile(
            module.forward,
            dynamic=False if cut else None,
            # Torch's cache of whole graphs is for its own compiler alone.
            backend=_compile if by_sample and any(map(is_by_sample, module.modules())) else "inductor",
        )


def keep_to_oneself() -> None:
    """Sets torch's compile cache to a folder of this user's, unless the user has named one, and makes torch's default
    this user's, where precompiled headers and some pickles are whatever is set. Raises CompileError if another user has
    taken its name first: torch would run code from there.
    """
    default = default_compile_cache()
    if os.environ.get(_CACHE, default) == default:
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        os.environ[_CACHE] = folder = os.path.join(caches, "dslc", "inductor")
        os.makedirs(folder, mode=0o700, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(default, mode=0o700)
    status = os.lstat(default)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise CompileError(
            f"`train.compile` has torch keep compiled code in {default}, which is not a folder of yours: remove it, or "
            "name another folder for temporary files in TMPDIR"
        )
    if status.st_mode & 0o022:
        os.chmod(default, 0o700)


def _expect_compiler(device: torch.device) -> None:
    if device.type == "cuda":
        if not has_triton():
            raise CompileError(_text("triton, which PyTorch's builds for GPUs bring along", "install it, or"))
        if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
            raise CompileError(_text("a C compiler (cc, gcc or clang)", "install one, or"))
        return
    if not has_cpp_compiler():
        raise CompileError(_text("a C++ compiler (g++)", "install one (or name it in CXX), or"))


def _text(what: str, remedy: str) -> str:
    return f"`train.compile` needs {what}, and this machine has none: {remedy} set `train.compile = false`"


# --------------------------------------------------------------------------------------------------- draws by sample

_PASSES: dict[int, tuple[SamplePass, DrawingLayer | None]] = {}  # of a step, each with the layer that ran


def forget_passes() -> None:
    """Forgets the passes of the step before, whose backward passes have ended."""
    _PASSES.clear()


@functools.cache
def _draw_operators() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Returns `dslc::begin_draws` and `dslc::draw`, which torch's compiler calls as they are."""

    def begin(counts: str) -> Tensor:
        samples = current_pass()
        if samples is None or ACTIVE.samples is None:
            return torch.zeros(1, dtype=torch.int64)
        number = len(_PASSES) + 1
        _PASSES[number] = samples, ACTIVE.layer
        for layer, count in json.loads(counts):
            ACTIVE.samples.draws[_name(ACTIVE.layer) if layer is None else layer] += count
        return torch.full((1,), number)

    def draw(
        graph_pass: Tensor,
        like: Tensor,
        operation: str,
        tensors: Sequence[Tensor],
        numbers: Sequence[float],
        integers: Sequence[int],
        layer: str | None,
        number: int,
    ) -> Tensor:
        before = ACTIVE.samples, ACTIVE.layer
        samples, running = _PASSES.get(int(graph_pass), (None, None))
        ACTIVE.layer = running if layer is None else LAYERS[layer]
        if samples is not None:
            name = _name(ACTIVE.layer)
            samples = replace(samples, draws=Counter({name: samples.draws[name] + number}))
        ACTIVE.samples = samples
        try:
            return _OPERATIONS[operation](torch.empty_like(like), *tensors, *numbers, *integers)
        finally:
            ACTIVE.samples, ACTIVE.layer = before

    beginning = torch.library.custom_op(
        "dslc::begin_draws",
        begin,
        mutates_args=(),
        schema="(str counts) -> Tensor",
        tags=(torch.Tag.nondeterministic_seeded,),
    )
    beginning.register_fake(lambda counts: torch.empty(1, dtype=torch.int64))
    drawing = torch.library.custom_op(
        "dslc::draw",
        draw,
        mutates_args=(),
        schema="(Tensor graph_pass, Tensor like, str operation, Tensor[] tensors, float[] numbers, SymInt[] integers, "
        "str? layer, int number) -> Tensor",
    )
    drawing.register_fake(lambda graph_pass, like, *_: torch.empty_like(like))
    return beginning, drawing


def _name(layer: DrawingLayer | None) -> str:
    return "" if layer is None else layer.name


_OPERATIONS: Mapping[str, Callable[..., Tensor]] = {
    "bernoulli": Tensor.bernoulli_,
    "uniform": Tensor.uniform_,
    "normal": Tensor.normal_,
    "exponential": Tensor.exponential_,
    "random": Tensor.random_,
    "randperm": lambda out: torch.randperm(len(out), out=out),
    # Torch checks the numbers of tensors.
    "bernoulli of chances": lambda out, chances: out.bernoulli_(chances),
    "normal of tensors": lambda out, mean, std: out.copy_(torch.normal(mean, std)),
    "multinomial": lambda out, chances, count: out.copy_(torch.multinomial(chances, count)),
}


def _compile(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compiles a graph, whose random operations draw by sample: a backend of torch's compiler."""
    before = ACTIVE.graph_draws
    ACTIVE.graph_draws = counts = Counter[str | None]()
    try:
        return compile_graph(graph, inputs, _decompositions(), functools.partial(_begin_graph, counts))
    finally:
        ACTIVE.graph_draws = before


def _begin_graph(counts: Counter[str | None], graph: torch.fx.Graph) -> None:
    """Begins a graph with a note of the pass, which its draws take. Some draws may be gone, as nothing uses them."""
    if not counts:
        return
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        note = graph.call_function(torch.ops.dslc.begin_draws.default, (json.dumps([*counts.items()]),))
    values = (node.meta.get("val") for node in graph.nodes)
    tensor = next(value for value in values if isinstance(value, Tensor))
    note.meta["val"] = tensor.new_empty(1, dtype=torch.int64, device="cpu")
    for node in graph.nodes:
        if node.target is torch.ops.dslc.draw.default:
            node.args = (note, *node.args[1:])


def _draw(like: Tensor, operation: str, *arguments: Tensor | float) -> Tensor:
    """Returns a tensor that an operation fills; its numbers count in the order in which the network draws."""
    layer: str | None = get_current_meta().get("custom", {}).get(LAYER)
    counts = ACTIVE.graph_draws
    assert counts is not None
    counts[layer] += 1
    tensors = [value for value in arguments if isinstance(value, Tensor)]
    scalars = [value for value in arguments if not isinstance(value, Tensor)]
    takes_integers = operation in ("random", "multinomial")
    numbers = [] if takes_integers else [float(value) for value in scalars]
    graph_pass = torch.zeros(1, dtype=torch.int64)  # `_begin_graph` gives the graph's
    filled: Tensor = torch.ops.dslc.draw(
        graph_pass, like, operation, tensors, numbers, scalars if takes_integers else [], layer, counts[layer] - 1
    )
    return filled


@functools.cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns what stands for torch's random operations in graphs: those that tracing knows (trace/draws.py)."""
    aten = torch.ops.aten
    decompositions: dict[Any, Callable[..., Any]] = {
        aten.native_dropout.default: _dropout,
        aten.native_dropout_backward.default: lambda gradient, mask, scale: (
            gradient * (mask.to(gradient.dtype) / (1 / scale))
        ),
        aten.bernoulli.default: _chances,
        aten.bernoulli.Tensor: lambda x, chances, **_: _draw(x, "bernoulli of chances", chances),
        aten.bernoulli.p: lambda x, p=0.5, **_: _draw(x, "bernoulli", p),
        aten.uniform.default: lambda x, low=0.0, high=1.0, **_: _draw(x, "uniform", low, high),
        aten.exponential.default: lambda x, rate=1.0, **_: _draw(x, "exponential", rate),
        aten.normal_functional.default: lambda x, mean=0.0, std=1.0, **_: _draw(x, "normal", mean, std),
        aten.random.to: lambda x, high, **_: _draw(x, "random", 0, high),
        getattr(aten.random, "from"): lambda x, low, high, **_: _draw(x, "random", low, high),
        aten.rand.default: lambda size, **how: _draw(_empty(size, how), "uniform", 0, 1),
        aten.randn.default: lambda size, **how: _draw(_empty(size, how), "normal", 0, 1),
        aten.rand_like.default: lambda x, **how: _draw(_like(x, how), "uniform", 0, 1),
        aten.randn_like.default: lambda x, **how: _draw(_like(x, how), "normal", 0, 1),
        aten.randint.default: lambda high, size, **how: _draw(_empty(size, how, torch.int64), "random", 0, high),
        aten.randint.low: lambda low, high, size, **how: _draw(_empty(size, how, torch.int64), "random", low, high),
        aten.randint_like.default: lambda x, high, **how: _draw(_like(x, how), "random", 0, high),
        aten.randint_like.low_dtype: lambda x, low, high, **how: _draw(_like(x, how), "random", low, high),
        aten.randperm.default: lambda n, **how: _draw(_empty([n], how, torch.int64), "randperm"),
        aten.normal.float_float: lambda mean, std, size, **how: _draw(_empty(size, how), "normal", mean, std),
        aten.multinomial.default: _choose,
    }
    for name in ("Tensor_float", "float_Tensor", "Tensor_Tensor"):
        decompositions[getattr(aten.normal, name)] = _normal
    return decompositions


def _empty(size: Sequence[int], how: dict[str, Any], dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(size, dtype=how.get("dtype") or dtype, device=how.get("device"))


def _like(x: Tensor, how: dict[str, Any]) -> Tensor:
    return torch.empty_like(x, dtype=how.get("dtype"), device=how.get("device"))


def _dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    mask = _draw(torch.empty_like(x, dtype=torch.bool), "bernoulli", 1 - p)
    return x * (mask.to(x.dtype) / (1 - p)), mask


def _chances(chances: Tensor, **_: object) -> Tensor:
    return _draw(chances, "bernoulli of chances", chances)


def _normal(mean: Tensor | float, std: Tensor | float = 1.0, **_: object) -> Tensor:
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    like = torch.broadcast_tensors(*tensors)[0]
    return _draw(torch.empty_like(like, memory_format=torch.contiguous_format), "normal of tensors", mean, std)


def _choose(chances: Tensor, count: int, replacement: bool = False, **_: object) -> Tensor:
    if replacement and count > 1:
        result: Tensor = NotImplemented  # torch's kernel, of which W0608 tells
        return result
    shape = (*chances.shape[:-1], count)
    return _draw(chances.new_empty(shape, dtype=torch.int64), "multinomial", chances, count)
