"""The demands of the tensor and the context axis on a network, its sizes and its data.

Pure functions; E0415 to E0419, E0424, E0425 and E0440 to E0443. If a network's sizes are unknown its declaration is
checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.tensor_styles import TensorStyle
from dslc.compiler.model.model import ModelGraph
from dslc.compiler.placement.draws import draws_by_sample
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.losses import mixtures
from dslc.compiler.placement.shares import divisors
from dslc.compiler.placement.tensor_plan import EXPERT_WIDTH, TensorPlan, needs_whole
from dslc.compiler.rules.parallelism.tensor_plan import check_styles, report_scores, report_uneven
from dslc.dsl.diagnostics import Diagnostic, Note, division
from dslc.dsl.language import layers
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.registry import Call
from dslc.dsl.remedy import join_edits, join_remedies, remedy, remove_field, set_argument, set_field
from dslc.dsl.source import Span
from dslc.dsl.words import plural

if TYPE_CHECKING:
    from dslc.compiler.ir.module_facts import PieceFacts

WithHeads: TypeAlias = (
    layers.GPT | layers.ViT | layers.Llama | layers.LlamaBlock | layers.Attention | layers.TransformerBlock
)


def check_tensor(
    job: JobSpec, layout: Layout, source: SourceFacts, model: ModelGraph | None, cuts: TensorPlan | None
) -> Iterator[Diagnostic]:
    """Checks that the network can be cut over the tensor axis into equal parts."""
    ranks, span = layout.sizes["tensor"], job.parallelism.value_span("tensor")
    if job.model.has_user_network:
        yield from check_styles(job, ranks, source, model)
        return
    seen = set()  # by place, the numbers reported: a table and the head of one `gpt` are one number
    for block in _attention(job):
        if block.heads % ranks:
            seen.add((block.span, block.heads))
            yield from _report_heads(block, ranks, job)
        kv_heads = getattr(block, "kv_heads", None)
        if kv_heads is not None and kv_heads % ranks:
            near = [n for n in divisors(block.heads) if n % ranks == 0]
            help = f"`heads` and `kv_heads` that are multiples of {ranks}"
            if near:
                help = remedy(set_argument(block.span, "kv_heads", near[0]))
            yield from report_uneven("kv_heads", kv_heads, ranks, block.value_span("kv_heads"), job, help=help)
        vocab = getattr(block, "vocab", None)
        if vocab is not None and vocab % ranks:
            seen.add((block.span, vocab))
            yield from report_uneven("vocab", vocab, ranks, block.value_span("vocab"), job, at_least=source.vocab)
    if model is None or model.root is None or cuts is None:
        return
    plan = cuts
    yield from _check_known(job, model, plan)
    for module, name, value in plan.uneven:
        layer = model.layer_of(module)
        where = (layer.span if layer else None) or job.model.value_span("network")
        if name == "experts":
            yield from _report_experts(job, value, ranks, where)
            continue
        # Without heads to share, only attention's own rules find fault with its widths.
        if (where, value) not in seen and name not in ("heads", "kv_heads", "width"):
            seen.add((where, value))
            yield from _report_features(job, source, model, module, (name, value), ranks, where)
    for module in () if draws_by_sample(job, layout, model) else plan.noisy[:1]:
        layer = model.layer_of(module)
        yield Diagnostic(
            "E0424",
            "this dropout works on a tensor that every tensor-parallel rank holds whole, and each would "
            "drop different numbers",
            (layer.span if layer else None) or job.model.value_span("network"),
            label="along with layers that work on a piece of the sequence",
            notes=(Note("`parallelism.tensor` is set here", span),),
            help=remedy(set_field("parallelism.sequence", "false"), ", so that all ranks draw the same"),
        )
    yield from _check_pieces(layout, model, plan, span)


def _report_heads(block: WithHeads, ranks: int, job: JobSpec) -> Iterator[Diagnostic]:
    """Reports E0417 for heads. They divide the width, so the width may change with them."""
    heads, width = block.heads, getattr(block, "width", None)
    near = [n for n in (heads // ranks * ranks, -(-heads // ranks) * ranks) if n]
    remedies = []
    for n in near:
        parts = [set_argument(block.span, "heads", n)]
        wider = max(1, round(width / n)) * n if width is not None else None
        if wider != width:
            parts += [" with ", set_argument(block.span, "width", wider)]
        remedies.append(remedy(join_edits(*parts)))
    yield from report_uneven(
        "heads", heads, ranks, block.value_span("heads"), job, help=join_remedies(", or ", remedies)
    )


def _report_features(
    job: JobSpec,
    source: SourceFacts,
    model: ModelGraph,
    module: str,
    counted: tuple[str, int],
    ranks: int,
    where: Span | None,
) -> Iterator[Diagnostic]:
    """Reports E0417 for a table's rows or a dense layer's features; advises no fewer than the data needs."""
    name, value = counted
    last = model.layers[-1]
    if name == "features" and (module == last.name or module.startswith(f"{last.name}.")):
        yield from report_scores(name, value, ranks, where, job, source)
    else:
        at_least = source.vocab if name == "vocab" else None
        yield from report_uneven(name, value, ranks, where, job, at_least=at_least)


def _report_experts(job: JobSpec, hidden: int, ranks: int, where: Span | None) -> Iterator[Diagnostic]:
    """Reports E0230 for a width inside the experts whose share on a rank is too narrow for a grouped product."""
    mixture = next((each for each in mixtures(job) if each.hidden == hidden), None)
    step = EXPERT_WIDTH * ranks
    near = [n for n in (hidden // step * step, -(-hidden // step) * step) if n]
    edits = [remedy(set_argument(mixture.span if mixture is not None else None, "hidden", n)) for n in near]
    yield Diagnostic(
        "E0230",
        f"a grouped product needs widths that are multiples of {EXPERT_WIDTH}, and a tensor-parallel rank has "
        f"1/{ranks} of `hidden`, which is {hidden}",
        mixture.value_span("hidden") if mixture is not None else where,
        label=division(hidden, step),
        notes=(Note("`parallelism.tensor` is set here", job.parallelism.value_span("tensor")),),
        help=remedy(join_remedies(" or ", edits)),
    )


def _check_known(job: JobSpec, model: ModelGraph, plan: TensorPlan) -> Iterator[Diagnostic]:
    """Checks that all layers can stand beside cut ones, and that something is cut at all."""
    span = job.parallelism.value_span("tensor")
    data_axis = remove_field("parallelism.tensor", "use the data axis")
    advice = remedy(
        "attention, gated networks, experts, blocks of these, `gpt`, `llama` and `vit` do; ", data_axis, " for others"
    )
    if not plan.styles:
        yield Diagnostic(
            "E0416",
            "the network has no layer that knows how to be split over the tensor axis",
            span,
            notes=(Note("the network", job.model.value_span("network")),),
            help=advice,
        )
        return
    for name in plan.unknown[:1]:
        layer = model.layer_of(name)
        yield Diagnostic(
            "E0416",
            f"dslc cannot split `{layer.kind if layer else name}` over the tensor axis",
            span,
            notes=(Note("the layer", (layer.span if layer else None) or job.model.value_span("network")),),
            help=advice,
        )


def _check_pieces(layout: Layout, model: ModelGraph, plan: TensorPlan, span: Span | None) -> Iterator[Diagnostic]:
    """Checks that inputs of layers that work on pieces have as many positions for each."""
    ranks, context = layout.sizes["tensor"], layout.sizes["context"]
    for name, style in plan.styles:
        layer = model.layer_of(name) if style is TensorStyle.SPLIT else None
        if layer is None or not layer.input.shape:
            continue
        length = layer.input.shape[0] // context
        if length % ranks:
            yield Diagnostic(
                "E0419",
                f"sequences of {plural(length, 'position')} cannot be shared out over {ranks} tensor-parallel ranks",
                span,
                label=division(length, ranks),
                help=remedy(
                    set_field("parallelism.sequence", "false"),
                    f", or a length that is a multiple of {ranks * context}",
                ),
            )
            return


def check_context(job: JobSpec, layout: Layout, source: SourceFacts, model: ModelGraph | None) -> Iterator[Diagnostic]:
    """Checks that sequences can be cut into equal pieces, and that the layers work on each piece for itself."""
    ranks, span = layout.sizes["context"], job.parallelism.value_span("context")
    length = source.input.shape[0] if source.input and source.input.dtype == "int64" and source.input.shape else None
    if source.structures is not None:  # all of one length (structures.py)
        length = next((leaf.fixed[1] for leaf in source.structures[0].leaves), None)
    if length is None and source.input is not None:
        yield Diagnostic(
            "E0418",
            "the context axis shares out sequences of tokens, and these samples are not sequences",
            span,
            help=remedy(remove_field("parallelism.context", "use the data axis")),
        )
        return
    if length is not None and length % ranks:
        yield Diagnostic(
            "E0419",
            f"sequences of {plural(length, 'token')} cannot be shared out over {ranks} context-parallel ranks",
            span,
            label=division(length, ranks),
            help=f"a context that is a multiple of {ranks}",
        )
    pieces = model.traced.pieces if model is not None and model.traced is not None else None
    if pieces is not None and pieces.ranks == ranks and pieces.fault:
        yield from _report_pieces(job, pieces)
        return
    whole = needs_whole(model) if model is not None and model.root is not None else None
    if model is not None and whole is not None:
        layer = model.layer_of(whole)
        kind = layer.kind if layer else whole
        yield Diagnostic(
            "E0425",
            f"`{kind}` needs the whole sequence, of which a context-parallel rank has a piece",
            (layer.span if layer else None) or job.model.value_span("network"),
            notes=(Note("`parallelism.context` is set here", span),),
            help=remedy(remove_field("parallelism.context", "use the data axis")),
        )
        return
    target = source.target
    if length is not None and target is not None and target.shape[:1] != (length,):
        yield Diagnostic(
            "E0425",
            f"a target of each sample, not of each token, cannot be shared out over {ranks} context-parallel ranks",
            span,
            help=remedy(remove_field("parallelism.context", "use the data axis")),
        )


def _report_pieces(job: JobSpec, pieces: PieceFacts) -> Iterator[Diagnostic]:
    why = {
        "E0440": "the network mixes positions, of which a context-parallel rank has only some",
        "E0441": "the network's attention cannot be shared out over context-parallel ranks",
        "E0442": "the network's positions would not be those of a context-parallel rank's piece",
        "E0443": "on a piece of each sequence the network would not compute the same",
    }[pieces.code]
    yield Diagnostic(
        pieces.code,
        f"{why}: {pieces.fault}",
        job.parallelism.value_span("context"),
        notes=(Note("the network", job.model.value_span("network")),),
        help=pieces.help or remedy(remove_field("parallelism.context", "use the data axis")),
    )


def _attention(job: JobSpec) -> list[WithHeads]:
    blocks: list[WithHeads] = []

    def walk(value: object) -> None:
        if isinstance(value, WithHeads):
            blocks.append(value)
        elif isinstance(value, tuple):
            for item in value:
                walk(item)
        elif isinstance(value, Call) and hasattr(value, "layers"):
            walk(value.layers)

    walk(job.model.network)
    return blocks
