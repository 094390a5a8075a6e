"""Cuts a network over the tensor axis: modules and their styles (runtime/parallel/tensor_parallel.py).

Model: a value between layers is whole on each rank, or a piece of the sequence, or a share of the features.

- Attention: `qkv` a column, whose rows go head by head, so that a share of them is a share of the heads; `output` a
  row. The dense network of a transformer block: `up` a column, `down` a row.
- A run of such layers with norms, activations and dropout between them works on pieces of the sequence, if the layout
  has `sequence`: norms once instead of on every rank, and their results kept in pieces (Korthikanti et al. 2022).
  Separate projections are columns too, and norms of heads are summed; of a gated network `gate_proj` and `up_proj` are
  columns, `down_proj` a row.
- Two dense layers with only activations between them are a column and a row.
- Of a mixture of experts, each expert is cut by the width inside as a gated network is; the router is on every rank,
  and sees every token. So is the adapter of a stack: of `gate_up_proj` the second matrix is a column, of `down_proj`
  the first is a row. The other two are whole, and their gradients are summed.
- A table of tokens is cut by rows. So is the dense layer at the end, whose scores stay in shares for cross entropy that
  is plain or in chunks, and are put together for any other loss.
- All else is on every rank.

For a network that a function makes, the job or its library names modules and styles (tensor_patterns.py); if cut at the
end, it keeps its scores as above.

Contract: plain Python over the modules the network is made of. A module has one style, and besides `split` before it or
`gather` after it. Two modules that share a weight cut it alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from dslc.compiler.ir.nodes import ModelGraph, ParameterNode
from dslc.compiler.ir.parameter_names import BASE, FIRST, SECOND, base_name
from dslc.compiler.ir.steps import ModuleStep
from dslc.compiler.ir.tensor_styles import CUT_OF_EXPERTS, EXPERT_STYLES, TensorStyle
from dslc.compiler.placement.losses import wants_chunks
from dslc.compiler.placement.shares import largest
from dslc.compiler.placement.tensor_patterns import resolve_styles
from dslc.dsl.language import calls as c
from dslc.dsl.language.job import JobSpec

if TYPE_CHECKING:
    from dslc.compiler.ir.module_facts import CutCall

Leaf = tuple[str, ModuleStep]

EXPERT_WIDTH = 8  # the width inside an expert is a multiple: rows of a grouped product begin at multiples of 16 bytes

_BLOCKS = (".TransformerBlock", ".Attention", ".LlamaBlock", ".GroupedAttention")
_NORMS = ("LayerNorm", ".RMSNorm")
_ACTIVATIONS = ("ReLU", "GELU", "SiLU", "Tanh", "Sigmoid", "LeakyReLU", "ELU")
_WHOLE = (".PositionalEmbedding", ".PatchEmbedding", ".LastStep", ".MeanSteps", "Flatten")
_GATED = (".GatedMLP", ".MixtureOfExperts")
_DENSE = ("Linear", ".AdaptedLinear")
_KNOWN = (*_BLOCKS, *_NORMS, *_ACTIVATIONS, *_WHOLE, *_DENSE, "Embedding", "Dropout", ".Residual", *_GATED)
_ON_PIECES = (
    TensorStyle.COLUMN_OF_PIECES,
    TensorStyle.GATHERED_OF_PIECES,
    TensorStyle.SCORES_OF_PIECES,
    TensorStyle.ROW_TO_PIECES,
)
# Layers that work on each position for itself, or gather the other positions themselves.
_ALONG = (*_BLOCKS, *_NORMS, *_ACTIVATIONS, *_DENSE, "Embedding", "Dropout", ".PositionalEmbedding", *_GATED)


@dataclass(kw_only=True)
class TensorPlan:
    """`unknown` are the modules that cannot stand beside cut ones; `uneven` the counts that ranks cannot share, each
    with the module and the kind of count; `noisy` is dropout that ranks which compute the same would draw differently
    by torch's generators, and `drawn_pieces` dropout of a piece of the sequence.
    """

    styles: list[tuple[str, TensorStyle]] = field(default_factory=list)
    parts: dict[str, tuple[int, ...]] = field(default_factory=dict)  # rows of each part of a column, or of an expert
    loss_parallel: bool = False
    chunked_loss: bool = False  # the head computes the loss on its scores, which stay in shares
    sequence: bool = False
    unknown: list[str] = field(default_factory=list)
    uneven: list[tuple[str, str, int]] = field(default_factory=list)
    noisy: list[str] = field(default_factory=list)
    drawn_pieces: list[str] = field(default_factory=list)
    # Library layers whose input is a piece of the sequence, or a share of the features, from the layer before. For
    # other networks their seams say so.
    pieces: set[str] = field(default_factory=set)
    shares: set[str] = field(default_factory=set)

    def local_input_shape(self, layer: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Returns a rank's part of a sample `shape`, the input of `layer` ("": the loss); `sizes` are the axes'."""
        ranks = sizes["tensor"]
        if sizes["context"] > 1:
            shape = (shape[0] // sizes["context"], *shape[1:])
        if layer in self.pieces:
            return (shape[0] // ranks, *shape[1:])
        return (*shape[:-1], shape[-1] // ranks) if layer in self.shares else shape

    @cached_property
    def rows(self) -> frozenset[str]:
        """Modules whose weight and bias are cut by rows."""
        return frozenset(name for name, style in self.styles if style.cut == 0)

    @cached_property
    def columns(self) -> frozenset[str]:
        """Modules whose weight is cut by columns."""
        return frozenset(name for name, style in self.styles if style.cut == 1)

    @cached_property
    def experts(self) -> frozenset[str]:
        """Modules of stacked experts that are cut by the width inside."""
        return frozenset(f"{name}.experts" for name, style in self.styles if style in EXPERT_STYLES)

    def cut_of(self, parameter: str) -> int | None:
        """Returns the dim along which a parameter is cut; None if every rank has it whole."""
        module, _, name = parameter.rpartition(".")
        if base_name(module) in self.experts:
            return CUT_OF_EXPERTS[name]
        return 0 if module in self.rows else 1 if module in self.columns and name == "weight" else None

    def by_style(self, style: TensorStyle) -> list[str]:
        return [name for name, module_style in self.styles if module_style is style]

    @cached_property
    def by_module(self) -> dict[str, list[TensorStyle]]:
        styles: dict[str, list[TensorStyle]] = {}
        for name, style in self.styles:
            styles.setdefault(name, []).append(style)
        return styles


def tensor_plan(job: JobSpec, ranks: int, model: ModelGraph, *, sequence: bool) -> TensorPlan:
    """Returns the plan on `ranks` ranks; for a network that a function makes, the plan of the job or its library.
    `sequence`: where layers allow it, they work on pieces of the sequence.
    """
    if ranks == 1:
        return TensorPlan()
    if model.root is None:
        return _of_patterns(job, ranks, model)
    plan = TensorPlan()
    leaves, adapted = list(_leaves(model.root)), frozenset(_adapted(model.root))
    plan.unknown = [name for name, step in leaves if step.kind not in _KNOWN]
    runs = _runs(leaves) if sequence else []
    plan.sequence = bool(runs)
    alone = {name.rpartition(".")[0] for name, _ in model.ties}
    if wants_chunks(job):
        alone.add(leaves[-1][0])  # the head, which must have some scores of each token
    _dense([leaf for leaf in leaves if leaf[0] not in alone], runs, ranks, plan)
    _tables(leaves, ranks, plan)
    for run in runs:
        plan.styles.append((leaves[run.start][0], TensorStyle.SPLIT))
        plan.pieces.update(leaves[number][0] for number in run if number > run.start)
    for number, leaf in enumerate(leaves):
        _inside(leaf, ranks, any(number in run for run in runs), plan)
    _head(job, model, leaves, runs, ranks, plan)
    plan.styles = [pair for name, style in plan.styles for pair in _beside_adapter(name, style, adapted)]
    return plan


def _adapted(step: ModuleStep, path: str = "") -> Iterator[str]:
    """Yields the dense layers with an adapter."""
    for child in step.children:
        name = f"{path}.{child.name}" if path else child.name
        if child.kind == ".AdaptedLinear":
            yield name
        yield from _adapted(child, name)


def _beside_adapter(name: str, style: TensorStyle, adapted: frozenset[str]) -> list[tuple[str, TensorStyle]]:
    """Returns the styles of what is in a dense layer with an adapter, in place of its own. Of a column the second
    matrix is one too, and the first is whole; of a row the first is one, and the second is whole. A whole matrix that
    works on pieces of the sequence has its gradients summed.
    """
    if name not in adapted or style.cut is None:
        return [(name, style)]
    is_row = style.cut == 1
    cut, whole = (FIRST, SECOND) if is_row else (SECOND, FIRST)
    has_pieces = style in _ON_PIECES
    summed = [(f"{name}.{whole}", TensorStyle.SUMMED)] if has_pieces else []
    return [(f"{name}.{BASE}", style), (f"{name}.{cut}", style), *summed]


def _of_patterns(job: JobSpec, ranks: int, model: ModelGraph) -> TensorPlan:
    assert model.traced is not None, "a network that was traced"
    resolved, shares = resolve_styles(job.parallelism.tensor_plan, model.traced, ranks), model.traced.shares
    plan = TensorPlan(styles=resolved.styles, parts=resolved.parts, uneven=resolved.uneven)
    head = shares.head if shares else ""
    if dict(resolved.styles).get(head) in (TensorStyle.COLUMN, TensorStyle.GATHERED):
        style = _head_style(job, plan)
        plan.styles = [(name, style if name == head else own_style) for name, own_style in resolved.styles]
    return plan


def _head_style(job: JobSpec, plan: TensorPlan) -> TensorStyle:
    """Returns the style of the head, and notes in the plan how the loss is computed on scores in shares."""
    plan.chunked_loss = wants_chunks(job)
    plain = isinstance(job.model.loss, c.CrossEntropy) and job.model.loss.label_smoothing == 0
    plan.loss_parallel = plain and not plan.chunked_loss
    return TensorStyle.SCORES if plan.loss_parallel or plan.chunked_loss else TensorStyle.GATHERED


def shape_on_a_rank(plan: TensorPlan, ranks: int, experts: int = 1) -> Callable[[ParameterNode], tuple[int, ...]]:
    """Returns a function: the shape of a rank's share of a parameter, or of all of it if every rank has it whole.
    `ranks` are on the tensor axis, `experts` on the expert axis.
    """

    def shape(parameter: ParameterNode) -> tuple[int, ...]:
        dim, full = plan.cut_of(parameter.name), parameter.shape
        if parameter.experts:
            full = (largest(full[0], experts), *full[1:])
        return full if dim is None else (*full[:dim], largest(full[dim], ranks), *full[dim + 1 :])

    return shape


def calls_by_layer(model: ModelGraph) -> dict[str, list[CutCall]]:
    """Returns the calls of cut modules in a network that a function makes, by the layer that contains them."""
    by_layer: dict[str, list[CutCall]] = {}
    shares = model.traced.shares if model.traced is not None else None
    names = {layer.name for layer in model.layers}
    for call in shares.calls if shares else ():
        owner = call.module
        while owner and owner not in names:
            owner = owner.rpartition(".")[0]
        by_layer.setdefault(owner, []).append(call)
    return by_layer


def needs_whole(model: ModelGraph) -> str | None:
    """Returns the first module that must see whole sequences, or None."""
    assert model.root is not None, "a network of library layers"
    return _needs_whole(model.root, "")


def _needs_whole(root: ModuleStep, path: str) -> str | None:
    for name, step in _leaves(root, path):
        if step.kind == ".Residual":
            reason = next(filter(None, (_needs_whole(child, f"{name}.{child.name}") for child in step.children)), None)
            if reason:
                return reason
        elif step.kind not in _ALONG:
            return name
    return None


def _leaves(step: ModuleStep, path: str = "") -> Iterator[Leaf]:
    """Yields the modules in the order of their calls; a Sequential yields its parts."""
    for child in step.children:
        name = f"{path}.{child.name}" if path else child.name
        if child.kind == "Sequential":
            yield from _leaves(child, name)
        else:
            yield name, child


def _runs(leaves: Sequence[Leaf]) -> list[range]:
    """Returns the runs of layers that work on pieces of the sequence: those with attention, up to one that cannot."""
    runs, start = [], 0
    fine = [step.kind in (*_BLOCKS, *_NORMS, *_ACTIVATIONS, "Dropout", *_GATED) for _, step in leaves]
    while start < len(leaves):
        stop = start
        while stop < len(leaves) and fine[stop]:
            stop += 1
        if any(leaves[n][1].kind in _BLOCKS for n in range(start, stop)):
            runs.append(range(start, stop))
        start = max(stop, start + 1)
    return runs


# ----------------------------------------------------------------------------------------------------- inside layers


def _inside(leaf: Leaf, ranks: int, pieces: bool, plan: TensorPlan) -> None:
    """Cuts attention, the dense network of a block, norms, and the parts of a residual."""
    name, step = leaf
    match step.kind:
        case ".TransformerBlock" | ".LlamaBlock":
            for child in step.children:
                _inside((f"{name}.{child.name}", child), ranks, pieces, plan)
        case ".Attention":
            _attention(name, step, ranks, pieces, plan)
        case ".GroupedAttention":
            _grouped(name, step, ranks, pieces, plan)
        case ".GatedMLP":
            _gated(name, step, ranks, pieces, plan)
        case "Sequential":  # the dense network of a block
            parts = {child.name: child for child in step.children}
            width = parts["up"].arguments["out_features"]
            if width % ranks:
                plan.uneven.append((f"{name}.up", "width", width))
            _pair(f"{name}.up", f"{name}.down", pieces, plan)
            if "dropout" in parts:
                _noise(f"{name}.dropout", pieces, plan)
        case ".Residual":
            for child in step.children:
                inner = [(f"{name}.{child.name}.{part}", each) for part, each in _leaves(child)]
                plan.unknown += [leaf_name for leaf_name, part in inner if part.kind not in _KNOWN]
                _dense(inner, [], ranks, plan)
                for leaf_pair in inner:
                    _inside(leaf_pair, ranks, False, plan)
        case ".MixtureOfExperts":
            _mixture(name, step, ranks, pieces, plan)
        case "LayerNorm" | ".RMSNorm" if pieces:
            plan.styles.append((name, TensorStyle.SEQUENCE))
        case "Dropout":
            _noise(name, pieces, plan)


def _attention(name: str, step: ModuleStep, ranks: int, pieces: bool, plan: TensorPlan) -> None:
    parts = {child.name: child for child in step.children}
    heads = parts["output"].arguments["in_features"] // step.arguments["head_dim"]
    if heads % ranks:
        plan.uneven.append((f"{name}.qkv", "heads", heads))
    _pair(f"{name}.qkv", f"{name}.output", pieces, plan)
    if "dropout" in parts:
        _noise(f"{name}.dropout", pieces, plan)


def _grouped(name: str, step: ModuleStep, ranks: int, pieces: bool, plan: TensorPlan) -> None:
    """Cuts separate projections by whole heads. The norms of heads have one weight for all of them."""
    parts = {child.name: child for child in step.children}
    for part, what in (("q_proj", "heads"), ("k_proj", "kv_heads")):
        heads = parts[part].arguments["out_features"] // step.arguments["head_dim"]
        if heads % ranks:
            plan.uneven.append((f"{name}.{part}", what, heads))
    for part in ("q_proj", "k_proj"):
        _column(f"{name}.{part}", pieces, plan)
    _pair(f"{name}.v_proj", f"{name}.o_proj", pieces, plan)
    plan.styles += [(f"{name}.{part}", TensorStyle.SUMMED) for part in ("q_norm", "k_norm") if part in parts]
    if "dropout" in parts:
        _noise(f"{name}.dropout", pieces, plan)


def _gated(name: str, step: ModuleStep, ranks: int, pieces: bool, plan: TensorPlan) -> None:
    """Cuts a gated network by the width inside."""
    hidden = {child.name: child for child in step.children}["up_proj"].arguments["out_features"]
    if hidden % ranks:
        plan.uneven.append((f"{name}.up_proj", "hidden", hidden))
    _column(f"{name}.gate_proj", pieces, plan)
    _pair(f"{name}.up_proj", f"{name}.down_proj", pieces, plan)


def _mixture(name: str, step: ModuleStep, ranks: int, pieces: bool, plan: TensorPlan) -> None:
    """Cuts each expert by the width inside, which `gate_up_proj` has twice, and the network of shared experts."""
    parts = {child.name: child for child in step.children}
    hidden = parts["experts"].arguments["hidden"]
    if hidden % (EXPERT_WIDTH * ranks):
        plan.uneven.append((f"{name}.experts", "experts", hidden))
    plan.styles.append((name, TensorStyle.EXPERTS_OF_PIECES if pieces else TensorStyle.EXPERTS))
    stacks = parts["experts"].arguments.get("stacks", ())
    wrappers = [f"{name}.experts{number * f'.{BASE}'}" for number in reversed(range(len(stacks)))]  # inner ones first
    plan.parts[f"{name}.experts{len(stacks) * f'.{BASE}'}"] = (hidden, hidden)
    for stack, wrapper in zip(stacks, wrappers, strict=True):
        cut, style, whole = (SECOND, TensorStyle.COLUMN, FIRST)
        if stack == "down_proj":
            cut, style, whole = (FIRST, TensorStyle.ROW, SECOND)
        else:
            plan.parts[f"{wrapper}.{cut}"] = (hidden, hidden)
        plan.styles += [(f"{wrapper}.{cut}", style), (f"{wrapper}.{whole}", TensorStyle.SUMMED)]
    if "shared_experts" in parts:
        _gated(f"{name}.shared_experts", parts["shared_experts"], ranks, pieces, plan)


def _column(name: str, pieces: bool, plan: TensorPlan) -> None:
    plan.styles.append((name, TensorStyle.COLUMN_OF_PIECES if pieces else TensorStyle.COLUMN))


def _pair(column: str, row: str, pieces: bool, plan: TensorPlan) -> None:
    _column(column, pieces, plan)
    plan.styles.append((row, TensorStyle.ROW_TO_PIECES if pieces else TensorStyle.ROW))


def _noise(name: str, pieces: bool, plan: TensorPlan) -> None:
    """Notes dropout. By torch's generators ranks with pieces draw for themselves, and so for what all of them have."""
    if pieces:
        plan.drawn_pieces.append(name)
    elif plan.sequence:
        plan.noisy.append(name)


# -------------------------------------------------------------------------------------------------- between layers


def _dense(leaves: Sequence[Leaf], runs: Sequence[range], ranks: int, plan: TensorPlan) -> None:
    """Cuts pairs of dense layers with only activations between them."""
    number = 0
    while number < len(leaves):
        second = number + 1
        while second < len(leaves) and leaves[second][1].kind in _ACTIVATIONS:
            second += 1
        pair = second < len(leaves) and leaves[number][1].kind in _DENSE and leaves[second][1].kind in _DENSE
        if pair:
            width = leaves[number][1].arguments["out_features"]
            if width % ranks:
                plan.uneven.append((leaves[number][0], "features", width))
            _pair(leaves[number][0], leaves[second][0], False, plan)
            plan.shares.update(name for name, _ in leaves[number + 1 : second + 1])
            number = second
        number += 1


def _tables(leaves: Sequence[Leaf], ranks: int, plan: TensorPlan) -> None:
    for name, step in leaves:
        if step.kind == "Embedding":
            plan.styles.append((name, TensorStyle.VOCABULARY))
            if step.arguments["num_embeddings"] % ranks:
                plan.uneven.append((name, "vocab", step.arguments["num_embeddings"]))


def _head(
    job: JobSpec, model: ModelGraph, leaves: Sequence[Leaf], runs: Sequence[range], ranks: int, plan: TensorPlan
) -> None:
    """Cuts the dense layer at the end, and ends the runs before it."""
    name, step = leaves[-1]
    follows_run = bool(runs) and runs[-1].stop == len(leaves) - 1
    is_unplanned = step.kind in _DENSE and all(owner != name for owner, _ in plan.styles)
    classes = step.arguments.get("out_features", 0) if is_unplanned else 0
    shared = any(parameter == f"{name}.weight" for parameter, _ in model.ties)
    if classes and classes % ranks and (shared or len(model.output.shape) > 1):
        plan.uneven.append((name, "vocab" if shared else "features", classes))
    is_divisible = bool(classes) and classes % ranks == 0
    if is_divisible:
        style = _head_style(job, plan)
        plan.styles.append((name, style.of_pieces if follows_run else style))
        plan.pieces.update((name,) if follows_run else ())
    for run in runs:
        if not (is_divisible and follows_run and run is runs[-1]):
            plan.styles.append((leaves[run.stop - 1][0], TensorStyle.GATHER))
