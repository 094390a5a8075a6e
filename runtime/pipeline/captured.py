"""Stages of a module that was recorded call by call (capture.py): the places to cut it, and the code of a stage.

Model: a cut lies before the first call of a layer. All values computed before it and needed after it cross from stage
to stage, also through stages that do not use them; values own to every stage are computed again.

Contract: every crossing value is a batch of floating-point numbers, samples first. A parameter is used on one stage
alone, unless it is tied. A cut that would break this is refused with a reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dslc.compiler.ir.program import PrecisionStep, TensorParallelStep
from dslc.compiler.trace.private_torch import own_parameters
from dslc.runtime.pipeline.capture import capture
from dslc.runtime.pipeline.input_form import InputForm
from dslc.runtime.pipeline.recording import LARGE, SMALL, Call, ModuleTensor, Recording, Result, full, touches
from dslc.runtime.pipeline.repeated_uses import Repeated

Crossing = tuple[tuple[tuple[int, ...], str], ...]  # shape of one sample and dtype of each tensor


@dataclass(frozen=True, kw_only=True)
class Seam:
    """The place before a layer, with the values that cross it, or the reason why there can be no cut."""

    sent: Crossing = ()
    refused: str = ""


@dataclass(frozen=True, kw_only=True)
class Code:
    """The code of a stage: the tensors it receives, its calls, and its results. `drops` are, for each call, the values
    that nothing needs after it; `used` are results that it also works with itself. `result` is the model's output.
    """

    receives: tuple[int, ...]
    calls: tuple[Call, ...]
    drops: tuple[tuple[int, ...], ...]
    gives: tuple[int, ...]
    used: frozenset[int]
    result: Result


# ---------------------------------------------------------------------------------------------------------- cutting


def look(
    model: nn.Module,
    layers: Sequence[str],
    root_names: Sequence[str],
    input_form: InputForm,
    precision: PrecisionStep,
    tensor: TensorParallelStep | None = None,
) -> tuple[tuple[str, ...], tuple[Seam, ...], tuple[Repeated, ...]]:
    """Returns the layers in order, the values across each cut, and parameters used again. Raises as `capture` does."""
    recordings = capture(model, layers, input_form, precision, tensor)
    layer_order = order(recordings, layers, root_names)
    return layer_order, seams(recordings, model, layer_order, root_names), recordings[True].repeated


def order(recordings: Mapping[bool, Recording], layers: Sequence[str], root_names: Iterable[str]) -> tuple[str, ...]:
    """Returns the layers in the order of their calls, "" where the parameters `root_names` of no layer are used."""
    recording = recordings[True]
    layer_order = sorted((name for name in layers if name), key=lambda name: recording.starts[name])
    if "" not in layers:
        return tuple(layer_order)
    names = set(root_names)
    first_call = next(
        (n for n, call in enumerate(recording.calls) if any(full(tensor) in names for tensor in call.held)), 0
    )
    position = sum(recording.starts[name] <= first_call for name in layer_order) if first_call else 0
    return (*layer_order[:position], "", *layer_order[position:])


def seams(
    recordings: Mapping[bool, Recording], model: nn.Module, layers: Sequence[str], root_names: Iterable[str]
) -> tuple[Seam, ...]:
    """Returns the seams between neighbours of `layers`, valid in training and in evaluation alike."""
    places = []
    of_layer = {name: {id(p) for p in model.get_submodule(name).parameters()} for name in layers if name}
    parameters = {
        f"{path}.{name}" if path else name: id(parameter)
        for path, module in model.named_modules()
        for name, parameter in own_parameters(module).items()
        if parameter is not None
    }
    root = {parameters[name] for name in root_names if name in parameters}
    for name in layers[1:]:
        if not name:
            places.append(Seam(refused="what the module itself holds belongs to the layer before"))
            continue
        mode_seams = [_seam(recording, name, of_layer, parameters, root) for recording in recordings.values()]
        reason = next((seam.refused for seam in mode_seams if seam.refused), "")
        if not reason and mode_seams[0] != mode_seams[1]:
            reason = "other tensors cross it in evaluation than in training"
        places.append(Seam(refused=reason) if reason else mode_seams[0])
    return tuple(places)


def _seam(
    recording: Recording,
    layer: str,
    of_layer: Mapping[str, set[int]],
    parameters: Mapping[str, int],
    root: set[int],
) -> Seam:
    if layer not in recording.starts:
        return Seam(refused=f"`{layer}` is not called in evaluation")
    position = recording.starts[layer]
    calls_before, calls_after = recording.calls[:position], recording.calls[position:]
    repeated_layers = {call.what for call in calls_before if call.layer} & {
        call.what for call in calls_after if call.layer
    }
    if repeated_layers:
        return Seam(refused=f"`{sorted(repeated_layers)[0]}` is called on both sides of it")
    if reason := _shared(calls_before, calls_after, of_layer, parameters, root):
        return Seam(refused=reason)
    facts = recording.facts
    for call in calls_after:
        written_memory = {facts[number].memory for number in call.changes} if not call.own else set()
        if any(
            facts[number].memory in written_memory for earlier_call in calls_before for number in earlier_call.gives
        ):
            return Seam(refused=f"a tensor of the stage before is written into ({call.where})")
    tensors = []
    for number in crossing(recording, position):
        fact = facts[number]
        shape = tuple(fact.small)
        if not fact.dtype.is_floating_point:
            return Seam(refused=f"a tensor of {_plain(fact.dtype)}, computed before it, is needed after it")
        if shape != (SMALL, *shape[1:]) or fact.large != (LARGE, *shape[1:]):
            return Seam(
                refused=f"a tensor of shape {shape} for 2 samples crosses it, whose first dimension is not theirs"
            )
        tensors.append((shape[1:], _plain(fact.dtype)))
    if not tensors:
        return Seam(refused="nothing that has a gradient crosses it")
    return Seam(sent=tuple(tensors))


def _shared(
    calls_before: Sequence[Call],
    calls_after: Sequence[Call],
    of_layer: Mapping[str, set[int]],
    parameters: Mapping[str, int],
    root: set[int],
) -> str:
    """Returns the reason why parameters used outside of their layers cannot be on one stage; "" if they can."""

    def loose(calls: Sequence[Call]) -> dict[int, str]:
        return {parameters[full(h)]: full(h) for call in calls for h in call.held if full(h) in parameters}

    def used(calls: Sequence[Call]) -> set[int]:
        return {p for call in calls if call.layer for p in of_layer.get(call.what, ())} | set(loose(calls))

    loose_before, loose_after = loose(calls_before), loose(calls_after)
    for parameter, name in (loose_before | loose_after).items():
        if parameter in used(calls_before) and parameter in used(calls_after):
            return f"`{name}`, which is used outside of a layer, is needed on both sides of it"
    names_before, names_after = (
        [name for p, name in loose_names.items() if p in root] for loose_names in (loose_before, loose_after)
    )
    if names_before and names_after:
        names = f"`{names_before[0]}` and `{names_after[0]}`"
        return f"the parameters {names}, which belong to no layer, are used on either side of it"
    return ""


def crossing(recording: Recording, position: int) -> tuple[int, ...]:
    """Returns the values that are computed before call `position`, needed from there on, and not own to every stage."""
    needed_numbers = set(recording.outputs).union(*(call.takes for call in recording.calls[position:]))
    computed_numbers = {number for call in recording.calls[:position] for number in call.gives} | set(
        range(recording.inputs)
    )
    return tuple(sorted(number for number in needed_numbers & computed_numbers if not recording.facts[number].own))


def code(recording: Recording, start: int, stop: int) -> Code:
    """Returns the code of the stage that has the calls `start` to `stop`."""
    is_last = stop == len(recording.calls)
    results = recording.outputs if is_last else crossing(recording, stop)
    receives = crossing(recording, start) if start else ()
    needed_numbers, calls = set(results) - set(receives), []
    for n in range(stop - 1, -1, -1):
        call = recording.calls[n]
        is_inside = n >= start
        if (is_inside or call.own) and (touches(recording, call, needed_numbers) or (is_inside and call.layer)):
            calls.append(call)
            needed_numbers |= call.takes - set(receives)
    calls.reverse()
    live_numbers, drops, inputs = set(results), [], set(range(recording.inputs))
    for call in reversed(calls):
        dead_numbers = ({*call.takes, *call.gives}) - live_numbers - inputs
        drops.append(tuple(dead_numbers))
        live_numbers |= dead_numbers
    used_results = frozenset(number for call in calls for number in call.takes if number in results)
    return Code(
        receives=receives,
        calls=tuple(calls),
        drops=tuple(reversed(drops)),
        gives=results,
        used=used_results,
        result=recording.result,
    )


def codes(recordings: Mapping[bool, Recording], firsts: Sequence[str]) -> list[dict[bool, Code]]:
    """Returns the code of the stages that begin with the layers `firsts`, in training and in evaluation."""
    stage_codes: list[dict[bool, Code]] = [{} for _ in firsts]
    for mode, recording in recordings.items():
        starts = [recording.starts[name] if n else 0 for n, name in enumerate(firsts)]
        for n, (start, stop) in enumerate(zip(starts, [*starts[1:], len(recording.calls)], strict=True)):
            stage_codes[n][mode] = code(recording, start, stop)
    return stage_codes


def tensors_used_by(codes: Mapping[bool, Code]) -> tuple[ModuleTensor, ...]:
    """Returns the parameters and buffers that a stage uses outside of layers."""
    return tuple(dict.fromkeys(h for code in codes.values() for call in code.calls for h in call.held))


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
