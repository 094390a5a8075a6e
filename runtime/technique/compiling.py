"""`torch.compile`, module by module and in place.

Model: the module's `forward` is replaced, on the instance, by its compiled form, which torch makes at the first call.
`nn.Module.compile` would leave torch's own modules uncompiled; and the work of hooks, such as gathering parameters, is
better left outside. The loss is compiled by itself (model/losses.py).

Contract: names, parameters and hooks stay; results agree with the plain module within rounding. If the machine lacks a
tool that torch needs to compile, a CompileError before the first step names it.

Draws by sample (sample_draws.py): torch's compiler would draw by a generator of its own. Here each random operation of
a graph becomes an operator, `dslc::draw`, which names its layer and its number within the graph. It fills the tensor as
uncompiled code does, in the pass over the micro-batch in which the graph began. Another operator, `dslc::begin_draws`,
notes that pass, so that the backward pass may draw again. Neither step nor sample are in the graph: nothing is compiled
anew for them.

Limits: code that torch cannot compile runs as it is, between compiled parts; but not in what is recomputed and draws by
sample, where torch ends the training. A second batch size (the last of an epoch, evaluation) is compiled once more, for
any size; on the tensor axis each size is compiled, as torch (2.13) has no dynamic sizes for DTensors.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dslc.compiler.trace.private_torch import (
    compile_graph,
    compiler_settings,
    default_compile_cache,
    has_cpp_compiler,
    has_triton,
)
from dslc.runtime.technique.sample_pass import ACTIVE, LAYER, LAYERS, DrawingLayer, SamplePass, current_pass

_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_VARIANTS = 16  # variants of one module: training or not, with gradients or not, sizes of a batch


class CompileError(RuntimeError):
    """The machine lacks a tool that `train.compile` needs."""


def apply(
    modules: tuple[str, ...],
    model: nn.Module,
    device: torch.device,
    *,
    cut: bool = False,
    by_sample: bool = False,
    recomputed: bool = False,
) -> None:
    """Has torch compile these modules of `model`, which will run on `device`, at their first call; `cut`: the tensor
    axis cuts them; `by_sample`: they draw by sample; `recomputed`: and some run again within compiled code. Raises
    CompileError.
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
    if by_sample:
        _draw_operators()
        # In what is recomputed a layer may say that it runs; the second pass has the layer's name in the graph.
        limits.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    for name in modules:
        module = model.get_submodule(name)
        module.forward = torch.compile(
            module.forward,
            dynamic=False if cut else None,
            backend=_DrawingBackend(name) if by_sample else "inductor",
            # Torch would recompute what it cannot compile without the pass over the samples.
            fullgraph=by_sample and recomputed,
        )


def keep_to_oneself() -> None:
    """Sets torch's compile cache to a folder of this user's, unless the user has named one. Another user could take the
    name of torch's default first; torch would load code and pickles from there.
    """
    if os.environ.get(_CACHE, default_compile_cache()) == default_compile_cache():
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        os.environ[_CACHE] = folder = os.path.join(caches, "dslc", "inductor")
        os.makedirs(folder, mode=0o700, exist_ok=True)


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
_COUNTS: dict[str, Counter[str]] = {}  # by graph: the draws of each layer, "" for the one that runs when it begins


def forget_passes() -> None:
    """Forgets the passes of the step before, whose backward passes have ended."""
    _PASSES.clear()


@functools.cache
def _draw_operators() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Returns `dslc::begin_draws` and `dslc::draw`, which torch's compiler calls as they are."""

    def begin(graph: str) -> Tensor:
        samples = current_pass()
        if samples is None or ACTIVE.samples is None:
            return torch.zeros(1, dtype=torch.int64)
        number = len(_PASSES) + 1
        _PASSES[number] = samples, ACTIVE.layer
        for name, count in _COUNTS[graph].items():
            ACTIVE.samples.draws[name or _name(ACTIVE.layer)] += count
        return torch.full((1,), number)

    def draw(begun: Tensor, like: Tensor, fill: str, numbers: Sequence[float], layer: str, number: int) -> Tensor:
        before = ACTIVE.samples, ACTIVE.layer
        samples, running = _PASSES.get(int(begun), (None, None))
        ACTIVE.layer = LAYERS[layer] if layer else running
        if samples is not None:
            name = _name(ACTIVE.layer)
            samples = replace(samples, draws=Counter({name: samples.draws[name] + number}))
        ACTIVE.samples = samples
        try:
            return _filled(torch.empty_like(like), fill, numbers)
        finally:
            ACTIVE.samples, ACTIVE.layer = before

    begin.__annotations__ = {"graph": str, "return": Tensor}
    draw.__annotations__ = {
        "begun": Tensor,
        "like": Tensor,
        "fill": str,
        "numbers": Sequence[float],
        "layer": str,
        "number": int,
        "return": Tensor,
    }
    beginning = torch.library.custom_op(
        "dslc::begin_draws", begin, mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
    )
    beginning.register_fake(lambda graph: torch.empty(1, dtype=torch.int64))
    drawing = torch.library.custom_op("dslc::draw", draw, mutates_args=())
    drawing.register_fake(lambda begun, like, fill, numbers, layer, number: torch.empty_like(like))
    return beginning, drawing


def _name(layer: DrawingLayer | None) -> str:
    return "" if layer is None else layer.name


def _filled(out: Tensor, fill: str, numbers: Sequence[float]) -> Tensor:
    match fill:
        case "bernoulli":
            return out.bernoulli_(*numbers)
        case "uniform":
            return out.uniform_(*numbers)
        case "normal":
            return out.normal_(*numbers)
        case "exponential":
            return out.exponential_(*numbers)
        case "integers":
            return out.random_(*map(int, numbers))
    return torch.randperm(len(out), out=out)


class _DrawingBackend:
    """Compiles the graphs of a module, whose random operations draw by sample."""

    def __init__(self, module: str) -> None:
        self._module, self._graphs = module, 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self._graphs += 1
        name, before = f"{self._module}/{self._graphs}", ACTIVE.compiles
        _COUNTS[name] = Counter()
        ACTIVE.compiles = True
        try:
            return compile_graph(graph, inputs, _decompositions(), functools.partial(_number, name))
        finally:
            ACTIVE.compiles = before


def _number(name: str, graph: torch.fx.Graph) -> None:
    """Gives the draws of a graph their layers and numbers, and begins it with a note of the pass."""
    counts, begun = _COUNTS[name], None
    for node in list(graph.nodes):
        if node.target is not torch.ops.dslc.draw.default:
            continue
        if begun is None:
            with graph.inserting_before(next(each for each in graph.nodes if each.op != "placeholder")):
                begun = graph.call_function(torch.ops.dslc.begin_draws.default, (name,))
            begun.meta["val"] = node.args[0].meta["val"]
        layer = node.meta.get("custom", {}).get(LAYER, "")
        node.args = (begun, *node.args[1:4], layer, counts[layer])
        counts[layer] += 1


def _draw(like: Tensor, fill: str, *numbers: float) -> Tensor:
    """Returns a tensor that a kernel fills; `_number` completes the call."""
    begun = torch.zeros(1, dtype=torch.int64)
    made: Tensor = torch.ops.dslc.draw(begun, like, fill, [float(number) for number in numbers], "", 0)
    return made


@functools.cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns what stands for torch's random operations in graphs: those that tracing knows (trace/draws.py)."""
    aten = torch.ops.aten
    made: dict[Any, Callable[..., Any]] = {
        aten.native_dropout.default: _dropout,
        aten.native_dropout_backward.default: lambda gradient, mask, scale: (
            gradient * (mask.to(gradient.dtype) / (1 / scale))
        ),
        aten.bernoulli.default: _chances,
        aten.bernoulli.Tensor: lambda x, chances, **_: _chances(chances.expand(x.shape)).to(x.dtype),
        aten.bernoulli.p: lambda x, p=0.5, **_: _draw(x, "bernoulli", p),
        aten.uniform.default: lambda x, low=0.0, high=1.0, **_: _draw(x, "uniform", low, high),
        aten.exponential.default: lambda x, rate=1.0, **_: _draw(x, "exponential", rate),
        aten.normal_functional.default: lambda x, mean=0.0, std=1.0, **_: _draw(x, "normal", mean, std),
        aten.random.to: lambda x, high, **_: _draw(x, "integers", 0, high),
        getattr(aten.random, "from"): lambda x, low, high, **_: _draw(x, "integers", low, high),
        aten.rand.default: lambda size, **how: _draw(_empty(size, how), "uniform", 0, 1),
        aten.randn.default: lambda size, **how: _draw(_empty(size, how), "normal", 0, 1),
        aten.rand_like.default: lambda x, **how: _draw(_like(x, how), "uniform", 0, 1),
        aten.randn_like.default: lambda x, **how: _draw(_like(x, how), "normal", 0, 1),
        aten.randint.default: lambda high, size, **how: _draw(_empty(size, how, torch.int64), "integers", 0, high),
        aten.randint.low: lambda low, high, size, **how: _draw(_empty(size, how, torch.int64), "integers", low, high),
        aten.randint_like.default: lambda x, high, **how: _draw(_like(x, how), "integers", 0, high),
        aten.randint_like.low_dtype: lambda x, low, high, **how: _draw(_like(x, how), "integers", low, high),
        aten.randperm.default: lambda n, **how: _draw(_empty([n], how, torch.int64), "order"),
        aten.normal.float_float: lambda mean, std, size, **how: _draw(_empty(size, how), "normal", mean, std),
        aten.multinomial.default: _choose,
    }
    for name in ("Tensor_float", "float_Tensor", "Tensor_Tensor"):
        made[getattr(aten.normal, name)] = _normal
    return made


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
    even = _draw(torch.empty_like(chances, dtype=torch.float32), "uniform", 0, 1)
    return (even < chances).to(chances.dtype)


def _normal(mean: Tensor | float, std: Tensor | float = 1.0, **_: object) -> Tensor:
    tensors = [each for each in (mean, std) if isinstance(each, Tensor)]
    like = tensors[0] if len(tensors) == 1 else torch.broadcast_tensors(*tensors)[0]
    return _draw(torch.empty(like.shape, dtype=like.dtype, device=like.device), "normal", 0, 1) * std + mean


def _choose(chances: Tensor, count: int, replacement: bool = False, **_: object) -> Tensor:
    if replacement and count > 1:
        result: Tensor = NotImplemented  # torch's kernel, of which W0608 tells
        return result
    quotients = chances / _draw(chances, "exponential", 1)
    return quotients.argmax(-1, keepdim=True) if count == 1 else quotients.topk(count, -1).indices
