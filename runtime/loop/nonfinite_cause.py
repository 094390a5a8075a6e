"""Finds the cause of numbers that are not finite, the module at fault, from what each rank has seen of a step.

The forward passes of the step are repeated, with other random numbers and a hook on every module. The ranks exchange
what they have seen, and all come to the same text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dslc.compiler.ir.program import JobProgram, RankPlace
from dslc.compiler.trace.code_place import generator_state, held_values, is_generator
from dslc.compiler.trace.private_torch import local_part, norms, tree_leaves
from dslc.compiler.trace.structures import tensors
from dslc.runtime.data.batches import StepBatch
from dslc.runtime.data.sampler import micro_batches, steps_per_epoch
from dslc.runtime.data.splits import sample_name
from dslc.runtime.loop.evaluate import forward
from dslc.runtime.measure.copy_digests import bit_sums
from dslc.runtime.parallel.context_parallel import input_piece_of, piece_of
from dslc.runtime.process import random_numbers
from dslc.runtime.step.assemble import TrainingComponents
from dslc.runtime.technique.precision import autocast


@dataclass(frozen=True, kw_only=True)
class NonFiniteOrigin:
    """The first module of a rank whose output was not finite, in the repeated step."""

    micro: int
    stage: int
    name: str
    kind: str
    handed: bool  # its input was not finite already

    @property
    def words(self) -> str:
        return f"`{self.name}` ({self.kind})" if self.name else f"the model itself ({self.kind})"


@dataclass(kw_only=True)
class NonFiniteObservation:
    """The observations of one rank in the step that ends the training."""

    rank: int
    steps: tuple[int, ...]  # the last steps in which its loss was not finite
    loss: float  # the last loss that is not finite; 0 if all are finite
    samples: tuple[str, ...] = ()  # the batch's samples with numbers that are not finite
    parameters: tuple[str, ...] = ()  # not finite, in the model's order
    culprit: NonFiniteOrigin | None = None
    finite_again: bool = True  # true if the loss of the repeated step is finite
    draws: bool = False  # the repeated step drew random numbers
    state: tuple[str, ...] = ()  # the attributes and buffers that the repeated step changed


def samples_of(job: JobProgram, place: RankPlace, step: int, batch: StepBatch) -> tuple[str, ...]:
    data = job.data
    indices = micro_batches(data, place, job.microbatches, *divmod(step - 1, steps_per_epoch(data)))
    samples = []
    for micro_indices, pair in zip(indices, batch.micro, strict=True):
        for what, part in zip(("input", "target"), pair, strict=True):
            for tensor in tensors(part):
                if not tensor.is_floating_point() or tensor.shape[:1] != micro_indices.shape:
                    continue
                rows = tensor.reshape(len(tensor), -1).isfinite().all(1).logical_not().nonzero().flatten().tolist()
                samples += [f"the {what} of {sample_name(data, 'train', int(micro_indices[row]))}" for row in rows]
    return tuple(samples)


@torch.no_grad()
def repeat(job: JobProgram, parts: TrainingComponents, batch: StepBatch, observation: NonFiniteObservation) -> None:
    """Repeats the forward passes of a step and notes the first module at fault, the loss, and what may differ."""
    generators, state = _generators(parts.device), _state(parts.plain)
    if job.compiled:
        torch.compiler.set_stance("force_eager")  # a compiled module need not call its submodules' hooks
    watch, cut, cut_input, finite = _OutputWatch(parts), piece_of(job), input_piece_of(job, parts.plain), True
    for number, (input, target) in enumerate(batch.micro):
        watch.micro = number
        own_target = cut(target)
        output = forward(job, parts, cut_input(input), own_target)
        if output is not None:
            with autocast(job.precision, parts.device):
                finite &= math.isfinite(parts.loss(output, own_target).item())
    parts.engine.let_go()
    observation.culprit, observation.finite_again, observation.draws = (
        watch.found,
        finite,
        _generators(parts.device) != generators,
    )
    observation.state = tuple(name for name, value in _state(parts.plain).items() if state.get(name) != value)


def _generators(device: torch.device) -> list[bytes]:
    """Returns the states of the random generators that a network draws from."""
    return [state.numpy().tobytes() for state in random_numbers.state(device).values()]


def _state(model: nn.Module) -> dict[str, object]:
    """Returns what a network keeps from call to call, by name: attributes of its modules and the values in them,
    variables of its files, then buffers.
    """
    state: dict[str, object] = {}
    for name, value in held_values(model):
        if isinstance(value, int | float | str):
            state[name] = value
        elif is_generator(value):
            state[name] = repr(generator_state(value))
        elif state_tensors := tensors(value):
            state[name] = bit_sums(state_tensors)
    buffers = dict(model.named_buffers())
    return state | dict(zip(buffers, bit_sums(list(buffers.values())), strict=True))


class _OutputWatch:
    """Puts hooks on every module to find the first whose output is not finite. They end with the process."""

    def __init__(self, parts: TrainingComponents) -> None:
        self.micro, self.found = 0, None
        axis = parts.pipeline
        stages = {} if axis is None else axis.stages
        of_stage = {id(module): index for index, stage in stages.items() for module in stage.modules()}
        for name, module in parts.plain.named_modules():
            module.register_forward_hook(self._hook(name, of_stage.get(id(module), 0)), with_kwargs=True)

    micro: int
    found: NonFiniteOrigin | None

    def _hook(self, name: str, stage: int) -> Callable[..., None]:
        def see(module: nn.Module, args: object, kwargs: object, output: object) -> None:
            if self.found is None and not _finite(output):
                handed = not _finite((args, kwargs))
                kind = type(module).__name__.removeprefix("FSDP")
                self.found = NonFiniteOrigin(micro=self.micro, stage=stage, name=name, kind=kind, handed=handed)

        return see


# ------------------------------------------------------------------------------------------------------------ in words


def values_text(culprits: Sequence[NonFiniteObservation]) -> str:
    values = "nan" if any(math.isnan(culprit.loss) for culprit in culprits) else "infinite"
    ranks = [str(culprit.rank) for culprit in culprits]
    if len(ranks) == 1:
        return f"{values}, on rank {ranks[0]}"
    ranks_text = ", ".join(ranks[:-1]) if len(ranks) <= 8 else ", ".join(ranks[:6]) + f", {len(ranks) - 7} more"
    return f"{values}, on ranks {ranks_text} and {ranks[-1]}"


def share_text(names: Sequence[str], all: int) -> str:
    return "" if all == 1 else f" ({len(names)} of {all})"


def parameters_text(names: Sequence[str], step: int, now: int) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    if step < now:
        return f"by now the parameters are not finite: `{names[0]}`{more}"
    return (
        f"the parameters were not finite when it began: `{names[0]}`{more}. If the loss of step {step - 1} was, then "
        "its gradient was not, or its update went too far"
    )


def told_by_repetition(
    observations: Sequence[NonFiniteObservation], bad_ranks: Collection[int]
) -> tuple[str | None, list[str]]:
    """Returns the module, and the lines that name it."""
    culprits = [
        (
            (observation.culprit.micro, observation.culprit.stage, observation.rank not in bad_ranks, observation.rank),
            observation.culprit,
        )
        for observation in observations
        if observation.culprit is not None
    ]
    if culprits:
        (_, _, _, rank), culprit = min(culprits, key=lambda pair: pair[0])
        words = f"the first module whose output is not finite is {culprit.words}"
        lines = [words if len(observations) == 1 else f"{words}, on rank {rank}"]
        if culprit.handed and not any(observation.samples for observation in observations):
            lines.append("its input was already not finite: that comes from code between modules")
        return culprit.name, lines
    if all(observation.finite_again for observation in observations):
        return None, [f"repeated, the step gave a finite loss: {_difference_text(observations)}"]
    return None, ["the output of every module is finite: the loss turns it into a value that is not"]


def _difference_text(observations: Sequence[NonFiniteObservation]) -> str:
    """Says by what a repeated step may have differed from the step."""
    state = list(dict.fromkeys(name for observation in observations for name in observation.state))
    if state:
        more = f" and {len(state) - 1} more" if len(state) > 1 else ""
        reason = f"the network keeps `{state[0]}`{more} from call to call, which the step had changed"
        return (
            f"{reason}, and its random numbers differed"
            if any(observation.draws for observation in observations)
            else reason
        )
    if any(observation.draws for observation in observations):
        return "its random numbers differed"
    return "it draws no random numbers, so that the network or the loss keeps something outside of its modules"


# --------------------------------------------------------------------------------------------------------- the numbers


def _finite(values: object) -> bool:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return all(bool(_local(tensor).isfinite().all()) for tensor in tensors)


@torch.no_grad()
def non_finite_names(named: Collection[tuple[str, Tensor | None]]) -> list[str]:
    """Returns the tensors with numbers that are not finite on this rank. Reads one number a device."""
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, tensor in named:
        local = None if tensor is None else _local(tensor)
        if local is not None and local.is_floating_point() and local.numel():
            by_device.setdefault(local.device, []).append((name, local))
    non_finite = set()
    for pairs in by_device.values():
        largest = norms([local for _, local in pairs], math.inf)
        fine = torch.stack([extreme.float() for extreme in largest]).isfinite()
        if not bool(fine.all()):
            non_finite |= {name for (name, _), is_finite in zip(pairs, fine.tolist(), strict=True) if not is_finite}
    return [name for name, _ in named if name in non_finite]


def _local(tensor: Tensor) -> Tensor:
    return local_part(tensor)
