"""Rules for initial weights: the files are there, and hold the tensors of the network. E0712, E0713, E0724 to E0726.

Pure functions over the headers of the files. Only torch can read files of `torch.save`, so their tensors are known only
in a run and with `--trace`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from dslc.compiler.facts.weights_file import Unreadable, entries_of, files_of
from dslc.compiler.facts.weights_match import Shapes, WeightMatch, faults, fit, matcher, renames_any, stars
from dslc.compiler.ir.facts import TensorEntry
from dslc.compiler.ir.nodes import ModelGraph
from dslc.compiler.ir.parameter_names import base_name, is_of_adapter, without_adapters
from dslc.compiler.rules.model.name_patterns import LIKELY, any_of, entry_at, likely_patterns, quoted, report_unmatched
from dslc.dsl.diagnostics import Note, Report
from dslc.dsl.language.calls import Pretrained
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.suggest import nearest_choice
from dslc.dsl.words import shorten_list

_FLOATS = ("F64", "F32", "F16", "BF16")
_SHOWN = 3  # names of a kind that a message lists, at most


def check_weights(
    job: JobSpec, model: ModelGraph | None, opened: Mapping[str, TensorEntry] | None, report: Report
) -> None:
    """Checks `model.weights`; `opened` are the tensors of files that only torch can read, None if they are unknown."""
    start = job.model.start
    if start is None or not _renames_are_good(start, report):
        return
    try:
        files = files_of(start.path)
        tensors = opened if files.torchs else entries_of(files)
    except Unreadable as absent:
        report.add(
            "W0712",
            str(absent),
            start.at("path"),
            help="a `.safetensors` file, a run directory, a folder or an index of `save_pretrained`, or a file of "
            "`torch.save`; paths are relative to the file that wrote them",
        )
        return
    if tensors is not None and _patterns_are_good(start, tensors, model, report) and model is not None:
        _check_fit(tensors, files.path, model, start, report)


def expected_tensors(model: ModelGraph) -> dict[str, tuple[int, ...]]:
    """Returns the tensors that a file of weights must hold, named without adapters, a tied weight by its first name."""
    parameters = {q.name: q.shape for layer in model.layers for q in layer.parameters if q.tied_to is None}
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


def _renames_are_good(start: Pretrained, report: Report) -> bool:
    wrong = [each for each in start.rename if stars(each)[1] > stars(each)[0]]
    for each in wrong:
        left, right = stars(each)
        report.add(
            "E0726",
            f"`{each}` has {right} `*` on the right, and {left} on the left whose text they could repeat",
            entry_at(start.at("rename"), each),
            help="`model.* -> *`: each `*` on the right is the text of the one at the same place on the left",
        )
    return not wrong


def _patterns_are_good(
    start: Pretrained, found: Mapping[str, TensorEntry], model: ModelGraph | None, report: Report
) -> bool:
    """Returns False if no pattern of a list matches anything: other faults may follow from it."""
    before = len(report.errors)
    for field in ("only", "rename", "allow_unused"):
        report_unmatched(
            "0724",
            f"`model.weights.{field}`: no tensor of the file is called @",
            start.at(field),
            getattr(start, field),
            list(found),
            report,
            what="its tensors",
            is_of=renames_any if field == "rename" else any_of,
        )
    if model is not None:
        report_unmatched(
            "0724",
            "`model.weights.allow_missing`: no tensor of the network is called @",
            start.at("allow_missing"),
            start.allow_missing,
            [*expected_tensors(model), *_ties(model)],
            report,
            what="its tensors",
        )
    return len(report.errors) == before


# -------------------------------------------------------------------------------------------------------- the fit


def _check_fit(
    found: Mapping[str, TensorEntry], file: str, model: ModelGraph, start: Pretrained, report: Report
) -> None:
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
        report.add(
            "E0713",
            f"{file} does not hold the weights of this network",
            start.at("path"),
            notes=[Note(message=f"the file {what} {shorten_list(names)}") for what, names in said],
            help=_remedy(made, wanted),
        )
    elif model.adapted and _report_random_parameters(made, model, start, report):
        return
    elif not made.taken:
        report.add(
            "E0725",
            f"{file} gives this network none of its tensors",
            start.at("path"),
            notes=[Note(message=f"the tensors of the {what} are called {shorten_list(quoted(names))}")
                   for what, names in (("file", list(found)), ("network", list(wanted)))],
            help="`rename` gives the tensors of the file the names of the network's; without `weights` all begin anew",
        )  # fmt: skip


def _report_random_parameters(made: WeightMatch, model: ModelGraph, start: Pretrained, report: Report) -> bool:
    """Reports parameters of a network with adapters that would keep random numbers: neither loaded nor trained."""
    still = {base_name(q.name) for layer in model.layers for q in layer.parameters if not q.trains}
    held = [name for name in made.initial if name in still]
    if held:
        owner = held[0].rpartition(".")[0]
        report.add(
            "E0729",
            f"{shorten_list(quoted(held))} would keep {'its' if len(held) == 1 else 'their'} random numbers: the file "
            "does not give them, and the adapter freezes them",
            start.span or start.at("path"),
            help=f'`save = ["{owner}"]` in the adapter trains it whole',
        )
    return bool(held)


def _remedy(made: WeightMatch, wanted: Shapes) -> str:
    """Returns the pattern that would mend the fit, as far as one can tell."""
    for name in made.missing[:_SHOWN]:
        longer = next((other for other in made.unused if other.endswith(f".{name}")), None)
        if longer is not None:
            return _pretrained(f"`{longer}` may be `{name}`", "rename", f"{longer.removesuffix(name)}* -> *")
        shorter = next((other for other in made.unused if name.endswith(f".{other}")), None)
        if shorter is not None:
            rename = _numbered(shorter, name) if made.taken else f"* -> {name.removesuffix(shorter)}*"
            return _pretrained(f"`{shorter}` may be `{name}`", "rename", rename)
        other = nearest_choice(name, made.unused[:LIKELY])
        if other is not None:
            return _pretrained(f"`{other}` of the file may be `{name}`", "rename", _numbered(other, name))
    without = [*made.missing, *(name for name, _ in made.unlike)]
    if without:
        pattern = _covering(without, [name for name in wanted if name not in without])
        return _pretrained("they keep their initial values", "allow_missing", pattern)
    if made.unused:
        taken = [there for _, there in (*made.taken, *made.copies)]
        return _pretrained("they are left out", "allow_unused", _covering(made.unused, taken))
    return ""


def _pretrained(why: str, field: str, pattern: str) -> str:
    return f'{why} with `pretrained("…", {field} = ["{pattern}"])`'


def _numbered(there: str, here: str) -> str:
    """Returns a rename of one tensor, of all with other numbers if both names have as many."""
    one, other = (re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in (there, here))
    return f"{one} -> {other}" if one.count("*") == other.count("*") else f"{there} -> {here}"


def _covering(names: Sequence[str], others: Iterable[str]) -> str:
    """Returns one pattern of all `names` and of none of `others`; of the first name alone if there is none."""
    rest = list(others)
    for pattern in islice(likely_patterns(names[:1]), LIKELY):
        is_one = matcher((pattern,))
        if all(map(is_one, names)) and not any(map(is_one, rest)):
            return pattern
    return names[0]
