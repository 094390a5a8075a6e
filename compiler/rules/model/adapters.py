"""Rules for adapters: what they stand beside, what trains whole, and what would neither be loaded nor train. E0623,
E0727 to E0730.

Which layers are dense, and which weights are stacks of experts, is known of dslc's own layers. Of other networks it is
known once they have been made, in a run and with `--trace`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from dslc.compiler.ir.nodes import ModelGraph
from dslc.compiler.ir.parameter_names import (
    BASE,
    STACKS,
    base_name,
    is_of_adapter,
    layers_with,
    target_of,
    targeted,
    targets_stack,
)
from dslc.compiler.ir.steps import ModuleStep
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.sharding import trained
from dslc.compiler.rules.model.name_patterns import quoted, unmatched_patterns
from dslc.dsl.diagnostics import Diagnostic, Note, passes
from dslc.dsl.language.calls import Lora
from dslc.dsl.language.job import JobSpec
from dslc.dsl.remedy import remedy, remove_argument, set_argument, set_field
from dslc.dsl.words import article, shorten_list


def check_adapter(job: JobSpec, model: ModelGraph | None, layout: Layout | None) -> Iterator[Diagnostic]:
    """Checks `model.adapter` against the network, as far as that is known."""
    adapter = job.model.adapter
    if adapter is None or model is None:
        return
    if model.root is not None and not (yield from passes(_check_layers(job, adapter, model.root, layout))):
        return
    shapes = {q.name: q.shape for layer in model.layers for q in layer.parameters}
    names = list(shapes)
    yield from _check_patterns(adapter, shapes)
    yield from _check_targets(adapter, model, names)
    yield from _check_saved(adapter, model)
    yield from _check_freeze(job, model, names)


def _check_layers(job: JobSpec, adapter: Lora, root: ModuleStep, layout: Layout | None) -> Iterator[Diagnostic]:
    """Checks the adapter of a network of dslc's own layers; tracing checks other networks."""
    modules = dict(_modules(root))
    experts = [name for name, step in modules.items() if step.kind in (".Experts", ".AdaptedExperts")]
    stacks = [f"{name}.{stack}" for name in experts for stack in STACKS]
    dense = [name for name, step in modules.items() if step.kind in ("Linear", ".AdaptedLinear")]
    wrong = [(name, modules[name]) for name in filter(targeted(adapter.targets), modules) if name not in dense]
    if wrong:
        kind = article(f"`{wrong[0][1].kind.removeprefix('.')}`")
        yield Diagnostic(
            "E0727",
            f"`{wrong[0][0]}` is {kind}, and adapters are beside dense layers and stacks of experts",
            adapter.value_span("targets"),
            help="`targets` of dense layers and stacks of experts; `save` for modules that are to train whole",
        )
        return
    adapted = [name for name in dense if modules[name].kind == ".AdaptedLinear"]
    adapted_stacks = [name for name in stacks if targets_stack(adapter.targets, name)]
    if not adapted and not adapted_stacks:
        yield from unmatched_targets(adapter, dense, stacks)
        return
    yield from _check_saved_targets(adapter, [*adapted, *adapted_stacks])
    if adapted_stacks and adapter.dropout:
        yield Diagnostic(
            "E0727",
            f"peft has no dropout beside stacks of experts, such as `{adapted_stacks[0]}`",
            adapter.value_span("dropout"),
            help="leave `dropout` out, or the stacks of experts",
        )
    elif layout is not None and layout.sizes["tensor"] > 1 and adapter.dropout:
        yield Diagnostic(
            "E0623",
            "an adapter with `dropout` does not work over a tensor axis in dslc's own layers",
            job.parallelism.value_span("tensor"),
            notes=(Note("the adapter", adapter.value_span("dropout")),),
            help=remedy(set_field("parallelism.tensor", 1), "; or ", remove_argument(adapter.span, "dropout")),
        )


def _check_saved_targets(adapter: Lora, targets: Sequence[str]) -> Iterator[Diagnostic]:
    """Reports adapters inside of modules that train whole."""
    is_saved = targeted(adapter.save)
    for name in targets:
        parts = name.split(".")
        saved = next(filter(is_saved, (".".join(parts[:n]) for n in range(1, len(parts) + 1))), None)
        if saved is not None:
            yield Diagnostic(
                "E0727",
                f"`{saved}` trains whole, and an adapter beside `{name}` would add nothing",
                adapter.value_span("save"),
                help="name it in one of the two",
            )
            return


def _modules(step: ModuleStep, path: str = "") -> Iterator[tuple[str, ModuleStep]]:
    """Yields the modules of a network by their names, without an adapter's own parts."""
    for child in step.children:
        name = f"{path}.{child.name}" if path else child.name
        yield name, child
        if child.kind != ".AdaptedLinear":
            yield from _modules(child, name)


def unmatched_targets(adapter: Lora, dense: Sequence[str], stacks: Sequence[str]) -> Iterator[Diagnostic]:
    """Reports patterns of targets that no dense layer and no stack of experts matches."""
    ends = [".".join(name.split(".")[-2:]) for name in stacks] + [name.rpartition(".")[2] for name in dense]
    yield from unmatched_patterns(
        "0727",
        "`model.adapter.targets`: no dense layer or stack of experts is called @",
        adapter.value_span("targets"),
        adapter.targets,
        [*dict.fromkeys(ends), *dense, *stacks],
        what="its dense layers and stacks" if stacks else "its dense layers",
        is_of=lambda pattern, _: targets_any(pattern, dense) or any(targets_stack([pattern], name) for name in stacks),
    )


def targets_any(pattern: str, names: Iterable[str]) -> bool:
    """True if a pattern of modules is one of some of the names."""
    return any(map(targeted([pattern]), names))


def _check_patterns(adapter: Lora, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Diagnostic]:
    """Reports patterns that name nothing. If no target did, the network could not be made."""
    whole = dict.fromkeys(base_name(name) for name in shapes if not is_of_adapter(name))
    parts = (name.split(".") for name in whole)
    modules = dict.fromkeys(".".join(each[:n]) for each in parts for n in range(1, len(each)))
    targets = [target_of(layer, shapes) for layer in layers_with(shapes)]
    message = "`model.adapter.{}`: no {} is called @"
    for field, what, known in (
        ("targets", "dense layer or stack of experts", targets),
        ("save", "module", list(modules)),
    ):
        yield from unmatched_patterns(
            "0727",
            message.format(field, what),
            adapter.value_span(field),
            getattr(adapter, field),
            known,
            what=f"its {what}s" if field == "save" else "those that others match",
            is_of=targets_any,
        )


def _check_targets(adapter: Lora, model: ModelGraph, names: list[str]) -> Iterator[Diagnostic]:
    """Reports layers whose adapter would do nothing, or that could not be merged."""
    unused = {name.rpartition(".lora_")[0] for name in model.unused if is_of_adapter(name)}
    tied = {name.rpartition(f".{BASE}.")[0] for pair in model.ties for name in pair if f".{BASE}." in name}
    layers = layers_with(names)
    for faulty, message, help in (
        (
            unused,
            "an adapter beside @ would do nothing: the forward pass does not call it",
            "name the layers that it calls, not those whose weight it reads",
        ),
        (
            tied,
            "an adapter beside @ could not be merged: its weight is also another layer's",
            "leave it out: its change would be the other layer's too",
        ),
    ):
        wrong = [layer for layer in layers if layer in faulty]
        if wrong:
            text = message.replace("@", shorten_list(quoted(wrong)))
            yield Diagnostic("E0728", text, adapter.value_span("targets"), help=help)


def _check_saved(adapter: Lora, model: ModelGraph) -> Iterator[Diagnostic]:
    """Reports a tied weight if only some of its names are in modules to save: peft trains a copy of these modules."""
    saved = targeted(adapter.save)

    def trains(name: str) -> bool:
        parts = name.split(".")
        return any(saved(".".join(parts[:n])) for n in range(1, len(parts)))

    for first in dict.fromkeys(whose for _, whose in model.ties):
        names = [base_name(name) for name in model.names.all_names(first)]
        apart = [name for name in names if not trains(name)]
        if not apart or len(apart) == len(names):
            continue
        one, other = next(name for name in names if name not in apart), apart[0]
        both = ", ".join(f'"{each}"' for each in (*adapter.save, *(name.rpartition(".")[0] for name in apart)))
        yield Diagnostic(
            "E0730",
            f"`{one}` is to train, and it is `{other}` as well, which is not: peft would train a copy, and the two "
            "would come apart",
            adapter.value_span("save"),
            help=remedy(
                set_argument(adapter.span, "save", f"[{both}]"),
                " trains the one weight for all of its modules; or leave it out of `save`",
            ),
        )


def _check_freeze(job: JobSpec, model: ModelGraph, names: list[str]) -> Iterator[Diagnostic]:
    """Reports `freeze` if it leaves no adapter to train."""
    training = trained(job, model)
    if job.model.freeze and training and not any(is_of_adapter(name) for name in training):
        yield Diagnostic(
            "E0711",
            "`model.freeze` leaves no adapter to train",
            job.model.value_span("freeze"),
            help="an adapter freezes all else by itself",
        )
