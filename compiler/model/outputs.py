"""Checks the network's output against the loss and the data's targets.

Cross entropy takes logits channel-last: `(…, classes)` for targets `(…)`. The other losses take the target's own shape;
a last dim of 1 may be missing or extra. The contrastive loss takes embeddings: `(width)` with a class as the target, or
`(views, width)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.nodes import LayerNode
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.model.value import Value, say
from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language import calls as c
from dslc.dsl.language.blocks import ModelSpec
from dslc.dsl.language.preferences import PreferenceLoss
from dslc.dsl.language.registry import Call
from dslc.dsl.remedy import Edit, either_field, remedy, replace_text, set_field
from dslc.dsl.source import Span
from dslc.dsl.words import plural


def check_output(
    model: ModelSpec, last_layer: LayerNode | None, output: Value, source: SourceFacts, suspects: list[Note]
) -> Iterator[Diagnostic]:
    """Reports E0210 to E0216, E0227, W0202 and W0651. `last_layer` is the layer that the output comes from."""
    span, target = _network_span(model, last_layer), source.target
    if isinstance(model.loss, c.Contrastive):
        yield from _check_embeddings(model, span, output, source)
    elif isinstance(model.loss, c.CrossEntropy | PreferenceLoss):
        yield from _check_classes(model, span, output, source, suspects)
    elif isinstance(model.loss, c.MSE | c.L1 | c.BCE) and target is not None:
        if isinstance(model.loss, c.BCE) and source.classes is not None and source.classes > 2:
            yield Diagnostic(
                "E0215",
                f"`bce` needs targets of 0 or 1, and the data's are {source.classes} classes",
                model.loss.span or model.value_span("loss"),
                help=remedy("use ", set_field("model.loss", "cross_entropy()", "`cross_entropy()`")),
            )
        elif _without_ones(output.shape) != _without_ones(target.shape):
            yield Diagnostic(
                "E0216",
                f"`{model.loss.word}` compares the network's output {say(output.shape)} "
                f"with the data's targets {say(target.shape)}",
                span,
                notes=(_of_loss(model), *suspects),
                help=remedy(
                    "the data's targets are classes: use ",
                    set_field("model.loss", "cross_entropy()", "`cross_entropy()`"),
                )
                if output.shape[:-1] == target.shape and (source.classes or source.vocab)
                else _advice(output.shape, target.shape),
            )


def classes_come_first(output: TensorFact | Value, source: SourceFacts) -> bool:
    """True if the scores of a sample have the classes in their first dim, as torch's own losses take them, and not in
    their last: the dims of the target follow.
    """
    if source.structures is not None:
        leaves = source.structures[1].leaves
        target = leaves[0].fixed[1:] if len(leaves) == 1 else ()
    else:
        target = source.target.shape if source.target is not None else ()
    return bool(target) and output.shape[1:] == target and output.shape[:-1] != target


def _check_embeddings(model: ModelSpec, span: Span | None, output: Value, source: SourceFacts) -> Iterator[Diagnostic]:
    target, shape = source.target, output.shape
    if len(shape) == 2 and shape[0] > 1:
        return
    if len(shape) != 1:
        yield Diagnostic(
            "E0227",
            f"`contrastive` needs one embedding, or several views, for each sample, and {output} comes out",
            span,
            notes=(_of_loss(model),),
            help="put `flatten()` before the last layer" if len(shape) > 2 else "a last layer that gives a vector",
        )
    elif target is not None and (target.dtype != "int64" or target.shape):
        yield Diagnostic(
            "E0227",
            "`contrastive` tells the positives of a single embedding by classes, and the data's targets are "
            f"{say(target.shape) if target.shape else 'numbers'} of {target.dtype}",
            model.loss.span or model.value_span("loss"),
            help='a class for each sample as the target, or several views of it; or `python("module:function", '
            "over = all)`",
        )


def _check_classes(
    model: ModelSpec, span: Span | None, output: Value, source: SourceFacts, suspects: list[Note]
) -> Iterator[Diagnostic]:
    target = source.target
    if target is not None and target.dtype.startswith(("float", "bfloat")):
        yield Diagnostic(
            "E0215",
            f"`{model.loss.word}` needs classes as targets, and the data's are real numbers",
            model.loss.span or model.value_span("loss"),
            help=_of_numbers(output, target),
        )
        return
    classes_first = classes_come_first(output, source)
    if not output.shape or (target is not None and output.shape[:-1] != target.shape and not classes_first):
        shape_text = "(classes)"
        if target is not None:
            shape_text = f"({', '.join([*map(str, target.shape), str(source.classes or source.vocab or 'classes')])})"
        what = "row" if isinstance(model.loss, PreferenceLoss) else "sample"
        yield Diagnostic(
            "E0215",
            f"`{model.loss.word}` needs {shape_text} for each {what}, and {output} comes out",
            span,
            notes=(_of_loss(model), *suspects),
            help=_advice((*output.shape[:-1],), target.shape if target is not None else ()),
        )
        return
    if target is not None and len(target.shape) > 1 and output.shape[:-1] == output.shape[1:] == target.shape:
        yield Diagnostic(
            "W0651",
            f"of scores {say(output.shape)} and a target {say(target.shape)} the first dim or the last may count the "
            "classes: the last is taken",
            span,
            notes=(_of_loss(model),),
            help="`output.movedim(1, -1)` at the end of `forward`, if the classes come first",
        )
    classes = source.classes if source.classes is not None else source.vocab
    if classes is None:
        return
    features = output.shape[0 if classes_first else -1]
    comes = f"{plural(features, 'number')} {'comes' if features == 1 else 'come'}"
    if features < classes:
        yield Diagnostic(
            "E0210",
            f"{comes} out for {plural(classes, 'class')}",
            span,
            label=f"{features} < {classes}",
            notes=(_of_loss(model),),
            help=remedy(f"the data's targets are 0 to {classes - 1}: ", _sized(span, features, classes)),
        )
    elif features > classes and source.classes is not None:  # else the data tells no more than its largest token
        yield Diagnostic(
            "W0202",
            f"{comes} out for {plural(classes, 'class')}: {features - classes} more than can ever be right",
            span,
            label=f"{features} > {classes}",
            notes=(_of_loss(model),),
        )


def _of_numbers(output: Value, target: TensorFact) -> str:
    """Returns a hint if targets shaped like the output may be one-hot classes, which cross entropy takes as indices."""
    if target.shape[-1:] > (1,) and target.shape == output.shape:
        why = "one-hot targets: have the data give the indices of the classes, `target.argmax(-1)`; real numbers: use "
        return remedy(why, either_field("model.loss", ("mse()", "l1()"), "`{}`"))
    losses = either_field("model.loss", ("mse()", "l1()"), "`{}`")
    return remedy("use ", losses, "; if they are classes, have the data give them as whole numbers")


def _sized(place: Span | None, features: int, classes: int) -> Edit | str:
    """Advises as many features as classes, in the text of the last layer or its number."""
    text = f"make it {plural(classes, 'number')}"
    source_text = place.text() if place is not None else ""
    if place is None or len(re.findall(rf"\b{features}\b", source_text)) != 1:
        return text
    return replace_text(place, re.sub(rf"\b{features}\b", str(classes), source_text), text)


def _network_span(model: ModelSpec, last_layer: LayerNode | None) -> Span | None:
    network = model.network
    if isinstance(network, Call):
        for argument in ("classes", "vocab"):
            if network.is_set(argument):
                return network.value_span(argument)
        return network.span
    return last_layer.span if last_layer else model.value_span("network")


def _of_loss(model: ModelSpec) -> Note:
    return Note("the loss is set here", model.loss.span or model.value_span("loss"))


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _advice(output: tuple[int, ...], target: tuple[int, ...]) -> str:
    """Returns advice on how to give the output the leading dims of the target."""
    if len(output) == 1 and not target:
        return "one answer for a sequence: put `last_step()` or `mean_steps()` before the last layer"
    if len(output) > len(target):
        return "put `flatten()` before the last layer"
    return ""
