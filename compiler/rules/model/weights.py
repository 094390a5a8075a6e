"""Rules for initial weights: the files are there, and hold the tensors of the network. E0712, E0713, E0724 to E0726.

Pure functions over the headers of the files. Only torch can read files of `torch.save`, so their tensors are known only
in a run and with `--trace`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from dslc.compiler.facts.weights_file import Unreadable, entries_of, files_of
from dslc.compiler.facts.weights_match import Shapes, WeightMatch, faults, fit, renames_any, stack_experts, stars
from dslc.compiler.ir.facts import TensorEntry
from dslc.compiler.ir.nodes import ModelGraph
from dslc.compiler.ir.parameter_names import base_name, is_of_adapter, matches, without_adapters
from dslc.compiler.rules.model.name_patterns import (
    LIKELY,
    any_of,
    entry_at,
    likely_patterns,
    quoted,
    unmatched_patterns,
)
from dslc.dsl.diagnostics import Diagnostic, Note, passes
from dslc.dsl.language.calls import Pretrained
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.preferences import REFERENCES, ReferencedLoss
from dslc.dsl.language.suggest import nearest_choice
from dslc.dsl.remedy import remedy, replace_text, set_argument
from dslc.dsl.words import shorten_list

_FLOATS = ("F64", "F32", "F16", "BF16")
_SHOWN = 3  # names of a kind that a message lists, at most


def check_weights(
    job: JobSpec, model: ModelGraph | None, opened: Mapping[str, TensorEntry] | None
) -> Iterator[Diagnostic]:
    """Checks `model.weights`, and a file that is the reference of the loss; `opened` are the tensors of files of the
    former that only torch can read, None if they are unknown.
    """
    start, loss = job.model.start, job.model.loss
    if start is not None and start.path and (yield from passes(_check_renames(start))):
        yield from _check_files(start, model, opened)
    if isinstance(loss, ReferencedLoss) and loss.reference not in REFERENCES:
        reference = Pretrained(path=loss.reference, span=loss.value_span("reference"))
        yield from _check_files(reference, model, None)


def _check_files(
    start: Pretrained, model: ModelGraph | None, opened: Mapping[str, TensorEntry] | None
) -> Iterator[Diagnostic]:
    try:
        files = files_of(start.path)
        tensors = opened if files.torchs else entries_of(files)
    except Unreadable as absent:
        yield Diagnostic(
            "W0712",
            str(absent),
            start.value_span("path"),
            help="a `.safetensors` file, a run directory, a folder or an index of `save_pretrained`, or a file of "
            "`torch.save`; paths are relative to the file that wrote them",
        )
        return
    if tensors is None:
        return
    tensors = _with_stacks(tensors, model)
    match = yield from passes(_check_patterns(start, tensors, model))
    if match and model is not None:  # other faults may follow from a list that matches nothing
        yield from _check_fit(tensors, files.path, model, start)


def _with_stacks(found: Mapping[str, TensorEntry], model: ModelGraph | None) -> Mapping[str, TensorEntry]:
    """Returns the tensors with the experts' matrices stacked as the model has them."""
    if model is None:
        return found
    stacks = stack_experts({name: entry.shape for name, entry in found.items()}, expected_tensors(model))
    pieces = {name for stack in stacks.values() for name in stack.names}
    return {name: entry for name, entry in found.items() if name not in pieces} | {
        name: TensorEntry(dtype=found[next(iter(stack.names))].dtype, shape=stack.shape)
        for name, stack in stacks.items()
    }


def expected_tensors(model: ModelGraph) -> dict[str, tuple[int, ...]]:
    """Returns the tensors that a file of weights must hold, named without adapters, a tied weight by its first name."""
    parameters = {q.name: q.file_shape for layer in model.layers for q in layer.parameters if q.tied_to is None}
    tensors = parameters | {b.name: b.shape for layer in model.layers for b in layer.buffers if b.saved}
    return without_adapters(tensors) if model.adapted else tensors


def _ties(model: ModelGraph) -> dict[str, str]:
    """Returns the further names of tied weights, without adapters, and the first of each."""
    return {base_name(name): base_name(whose) for name, whose in model.ties} if model.adapted else dict(model.ties)


def fit_of(start: Pretrained, found: Shapes, wanted: Shapes, ties: Mapping[str, str]) -> WeightMatch:
    """Returns the fit that the patterns of `start` ask for."""
    return fit(
        found,
        wanted,
        ties,
        only=start.only,
        rename=start.rename,
        allow_missing=start.allow_missing,
        allow_unused=start.allow_unused,
    )


# ------------------------------------------------------------------------------------------------------- patterns


def _check_renames(start: Pretrained) -> Iterator[Diagnostic]:
    for rename in start.rename:
        left, right = stars(rename)
        if right > left:
            yield Diagnostic(
                "E0726",
                f"`{rename}` has {right} `*` on the right, and {left} on the left whose text they could repeat",
                entry_at(start.value_span("rename"), rename),
                help="`model.* -> *`: each `*` on the right is the text of the one at the same place on the left",
            )


def _check_patterns(
    start: Pretrained, found: Mapping[str, TensorEntry], model: ModelGraph | None
) -> Iterator[Diagnostic]:
    there, wanted = list(found), [*expected_tensors(model), *_ties(model)] if model is not None else []
    lists = [("only", any_of, there), ("rename", renames_any, there), ("allow_unused", any_of, there)]
    if model is not None:
        lists.append(("allow_missing", any_of, wanted))
    for field, is_of, names in lists:
        yield from unmatched_patterns(
            "0724",
            f"`model.weights.{field}`: no tensor of the {'network' if names is wanted else 'file'} is called @",
            start.value_span(field),
            getattr(start, field),
            names,
            what="its tensors",
            is_of=is_of,
        )


# -------------------------------------------------------------------------------------------------------- the fit


def _check_fit(
    found: Mapping[str, TensorEntry], file: str, model: ModelGraph, start: Pretrained
) -> Iterator[Diagnostic]:
    shapes = {name: entry.shape for name, entry in found.items()}
    if model.adapted and any(map(is_of_adapter, found)):  # of a training with this adapter
        model = replace(model, adapted=False)
    wanted = expected_tensors(model)
    made = fit_of(start, shapes, wanted, _ties(model))
    buffers = {buffer.name for layer in model.layers for buffer in layer.buffers}
    unlike = [
        f"`{there}` is {found[there].dtype}"
        for name, there in made.taken
        if name not in buffers and found[there].dtype not in _FLOATS
    ]
    said = faults(made, shapes, wanted) + ([("has unlike tensors:", unlike)] if unlike else [])
    if said:
        yield Diagnostic(
            "E0713",
            f"{file} does not hold the weights of this network",
            start.value_span("path"),
            notes=tuple(Note(f"the file {what} {shorten_list(names)}") for what, names in said),
            help=_remedy(made, wanted, start),
        )
        return
    initial = yield from passes(_random_parameters(made, model, start) if model.adapted else ())
    if initial and not made.taken:
        yield Diagnostic(
            "E0725",
            f"{file} gives this network none of its tensors",
            start.value_span("path"),
            notes=tuple(Note(f"the tensors of the {what} are called {shorten_list(quoted(names))}")
                   for what, names in (("file", list(found)), ("network", list(wanted)))),
            help="`rename` gives the tensors of the file the names of the network's; without `weights` all begin anew",
        )  # fmt: skip


def _random_parameters(made: WeightMatch, model: ModelGraph, start: Pretrained) -> Iterator[Diagnostic]:
    """Reports parameters of a network with adapters that would keep random numbers: neither loaded nor trained."""
    still = {base_name(q.name) for layer in model.layers for q in layer.parameters if not q.trains}
    if held := [name for name in made.initial if name in still]:
        yield Diagnostic(
            "E0729",
            f"{shorten_list(quoted(held))} would keep {'its' if len(held) == 1 else 'their'} random numbers: the file "
            "does not give them, and the adapter freezes them",
            start.span or start.value_span("path"),
            help=f'`save = ["{held[0].rpartition(".")[0]}"]` in the adapter trains it whole',
        )


def _remedy(made: WeightMatch, wanted: Shapes, start: Pretrained) -> str:
    """Returns the pattern that would mend the fit, as far as one can tell."""
    for name in made.missing[:_SHOWN]:
        longer = next((other for other in made.unused if other.endswith(f".{name}")), None)
        if longer is not None:
            return _pretrained(start, f"`{longer}` may be `{name}`", "rename", f"{longer.removesuffix(name)}* -> *")
        shorter = next((other for other in made.unused if name.endswith(f".{other}")), None)
        if shorter is not None:
            rename = _numbered(shorter, name) if made.taken else f"* -> {name.removesuffix(shorter)}*"
            return _pretrained(start, f"`{shorter}` may be `{name}`", "rename", rename)
        other = nearest_choice(name, made.unused[:LIKELY])
        if other is not None:
            return _pretrained(start, f"`{other}` of the file may be `{name}`", "rename", _numbered(other, name))
    without = [*made.missing, *(name for name, _ in made.unlike)]
    if without:
        pattern = _covering(without, [name for name in wanted if name not in without])
        return _pretrained(start, "they keep their initial values", "allow_missing", pattern)
    if made.unused:
        taken = [there for _, there in (*made.taken, *made.copies)]
        return _pretrained(start, "they are left out", "allow_unused", _covering(made.unused, taken))
    return ""


def _pretrained(start: Pretrained, why: str, field: str, pattern: str) -> str:
    patterns = ", ".join(f'"{each}"' for each in (*getattr(start, field), pattern))
    text = f'`pretrained("…", {field} = ["{pattern}"])`'
    place = start.span if start.span is not None else start.value_span("path")
    if place is not None and place.text().startswith('"'):  # the path alone
        return remedy(why, " with ", replace_text(place, f"pretrained({place.text()}, {field} = [{patterns}])", text))
    return remedy(why, " with ", set_argument(place, field, f"[{patterns}]", text))


def _numbered(there: str, here: str) -> str:
    """Returns a rename of one tensor, of all with other numbers if both names have as many."""
    one, other = (re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in (there, here))
    return f"{one} -> {other}" if one.count("*") == other.count("*") else f"{there} -> {here}"


def _covering(names: Sequence[str], others: Iterable[str]) -> str:
    """Returns one pattern of all `names` and of none of `others`; of the first name alone if there is none."""
    rest = list(others)
    for pattern in islice(likely_patterns(names[:1]), LIKELY):
        is_one = partial(matches, (pattern,))
        if all(map(is_one, names)) and not any(map(is_one, rest)):
            return pattern
    return names[0]
