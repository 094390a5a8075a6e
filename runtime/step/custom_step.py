"""A step of the user's own, `train.step`: for trainings without a single loss and optimizer.

Model: the function is called once a step, with this rank's batch and a `StepContext`. Its `update` runs a backward
pass, sums the gradients over the ranks, divides them by the count of all losses, clips, and runs the optimizer. What
the function returns is logged as the loss of the step.

Contract: an update equals the update of one process with the global batch. Every rank makes the same updates in the
same order. What the step and the network draw follows from the sample (technique/sample_draws.py), over the whole step
as over one pass. A parameter of another part keeps its value and its optimizer state, and so does a parameter that no
rank has used.

Limits: the data axis. Where nothing is sharded, or the optimizer's state alone (ZeRO-1), gradients are exchanged after
a backward pass, not while it runs; of parts that are sharded (parallel/per_module_sharding.py) as soon as a part's are
there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslc.compiler.ir.program import JobProgram, LossStep, PythonFunction, RankPlace
from dslc.runtime.data.batches import StepBatch
from dslc.runtime.model.custom_losses import OwnSum
from dslc.runtime.model.losses import LossError
from dslc.runtime.parallel import per_module_sharding
from dslc.runtime.parallel.mesh import mesh_of
from dslc.runtime.process.job_line import mark_errors
from dslc.runtime.process.user_code import load_function
from dslc.runtime.step.assemble import TrainingComponents
from dslc.runtime.step.stepper import UNSEEN, StepCallbacks, StepResult, updater
from dslc.runtime.step.untried_draws import UntriedDraws
from dslc.runtime.technique.precision import autocast
from dslc.runtime.technique.sample_draws import SampleDraws
from dslc.runtime.technique.sample_pass import by_torch


class StepContext:
    """The arguments of a user's own step beside its batch.

    `model` is the network; `step` counts from 0 to `steps - 1`; `rank` is one of `ranks`; `samples` are the samples of
    the global batch, of all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        steps: int,
        close: Callable[[], Tensor | None],
        *,
        device: torch.device,
        scaler: torch.amp.GradScaler | None = None,
        seen: Callable[[Tensor], None] = UNSEEN.loss,
        group: dist.ProcessGroup | None = None,
        sharded: per_module_sharding.ShardedModules | None = None,
    ) -> None:
        self.model, self.device = model, device
        self.step, self.steps = 0, steps
        self.samples = 0
        self.rank, self.ranks = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
        self._close, self._seen, self._group, self._sharded = close, seen, group, sharded
        self._scaler = torch.amp.GradScaler(device.type, enabled=False) if scaler is None else scaler
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._selections: dict[tuple[str, ...], dict[str, nn.Parameter]] = {}  # by the parts that an update names
        self.norm: Tensor | None = None

    def update(self, losses: Tensor | tuple[Tensor, Tensor], *parts: str) -> None:
        """Updates some parts of the model, or all, by the mean over all ranks of losses, or of a pair (sum, count).
        Raises LossError.
        """
        with by_torch():
            if torch.is_autocast_enabled(self.device.type):
                with torch.autocast(self.device.type, enabled=False):
                    self._update(*_summed(losses), parts)
            else:
                self._update(*_summed(losses), parts)
        torch.clear_autocast_cache()  # which has copies of parameters as they were before

    def _update(self, total: Tensor, number: Tensor, parts: tuple[str, ...]) -> None:
        self._seen(total.detach())
        if self._group is not None:
            dist.all_reduce(number, group=self._group)
        loss, taken, apart = (
            self._scaler.scale(total / number.clamp(min=1)),
            self._selected_parameters(parts),
            set[str](),
        )
        if self._sharded is not None:
            used, apart = self._sharded.backward(loss), set(self._sharded.names)
            taken = {name: parameter for name, parameter in taken.items() if name in used or name not in apart}
        else:
            loss.backward()
        for name, parameter in self._parameters.items():
            if name not in taken:
                parameter.grad = None
        if self._group is not None:
            self._exchange([parameter for name, parameter in taken.items() if name not in apart])
        self.norm = self._close()
        if self._sharded is not None:
            self._sharded.let_go({*taken})

    def _selected_parameters(self, parts: tuple[str, ...]) -> dict[str, nn.Parameter]:
        if not parts or parts in self._selections:
            return self._selections[parts] if parts else self._parameters
        found = {
            name: parameter
            for name, parameter in self._parameters.items()
            if any(name == part or name.startswith(part + ".") for part in parts)
        }
        if not found:
            raise LossError(f"the model has no parameters under {' or '.join(parts)}, which the step updates")
        self._selections[parts] = found
        return found

    @torch.no_grad()
    def _exchange(self, parameters: list[nn.Parameter]) -> None:
        """Sums the gradients over the ranks, as one tensor, behind it how many ranks have each."""
        if not parameters:
            return
        used = torch.tensor([float(p.grad is not None) for p in parameters], device=self.device)
        pieces = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters]
        together = torch.cat([*pieces, used])
        dist.all_reduce(together, group=self._group)
        *summed, used = together.split([*(p.numel() for p in parameters), len(parameters)])
        for parameter, gradient, ranks in zip(parameters, summed, used.tolist(), strict=True):
            parameter.grad = gradient.view_as(parameter).clone() if ranks else None


def stepper(
    job: JobProgram, place: RankPlace, parts: TrainingComponents, looks: StepCallbacks = UNSEEN
) -> Callable[[StepBatch], StepResult]:
    """Returns the function that does one step."""
    named = job.own_step
    assert named is not None and job.microbatches == 1
    notify = looks.notify if place.rank == 0 else print
    function, told, draws = load_function(named), OwnSum(job.loss), SampleDraws(job, place, notify)
    untried = UntriedDraws(job, parts.plain, notify)
    group = mesh_of(job).group("data") if job.world_size > 1 else None
    close = updater(job, parts, looks)
    sharded = (
        per_module_sharding.ShardedModules(parts.plain, group, parts.device) if job.gradients.kind == "fsdp" else None
    )
    training = StepContext(
        parts.plain,
        job.steps,
        close,
        device=parts.device,
        scaler=parts.scaler,
        seen=looks.loss,
        group=group,
        sharded=sharded,
    )
    if group is not None and sharded is None:
        _begin_alike(parts.plain, group)

    def step(batch: StepBatch) -> StepResult:
        ((input, target),) = batch.micro
        training.samples, training.norm = batch.samples, None
        training.step = batch.number
        draws.begin(batch)
        draws.enter(0)
        with autocast(job.precision, parts.device), mark_errors(named.line), untried.watch():
            found = function(training, input if target is input else (input, target))
        draws.leave()
        total, number, further = told.interpret(found, target)
        if sharded is not None:
            sharded.let_go()
        total, number = total.detach(), torch.as_tensor(number, dtype=torch.float64, device=parts.device).detach()
        parts.further.update(further)
        if group is not None:
            dist.all_reduce(number, group=group)
        looks.between(batch, total, number)
        return StepResult(total, number, training.norm)

    return step


def try_out(
    step: PythonFunction,
    loss: LossStep,
    model: nn.Module,
    batch: object,
    samples: int,
    seen: Callable[[Tensor], None] = UNSEEN.loss,
) -> Tensor:
    """Does one step that updates nothing. Returns the sum of what it returns; `seen` gets the sum of each update's
    losses. Raises as the step does.
    """
    training = StepContext(model.train(), 1, model.zero_grad, device=torch.device("cpu"), seen=seen)
    training.samples = samples
    total, _, _ = OwnSum(loss).interpret(load_function(step)(training, batch), batch)
    return total.detach()


def _begin_alike(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Gives all ranks the first one's numbers: a model of a user's own may draw others on each."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor, group_src=0, group=group)


def _summed(losses: object) -> tuple[Tensor, Tensor]:
    if isinstance(losses, tuple | list) and len(losses) == 2:
        total, number = losses
        return total, torch.as_tensor(number, device=total.device).detach().double()
    if not isinstance(losses, Tensor) or losses.dim() == 0:
        raise LossError("`update` takes one loss for each sample, or a pair (sum, count): `reduction = 'none'`")
    return losses.sum(), torch.tensor(float(losses.numel()), dtype=torch.float64, device=losses.device)
