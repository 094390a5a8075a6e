"""The pipeline axis: cuts the stages of a rank out of the model, and runs them by torch's schedule runtime.

Model: every rank makes the whole model on the meta device, which costs nothing, and keeps the layers of its own stages
in place, under the names of one process. A user's own module may do anything between its layers: each rank first
records its forward pass (capture.py) and cuts that (captured.py). In a step torch's `_PipelineScheduleRuntime` runs the
program's own table (`ScheduleRun`); without gradients a batch goes from stage to stage (`Pipeline.forward`).

A tied weight whose layers are on two ranks exists twice, under the name that it has first in the model. The gradients
of both are summed after the passes (`Pipeline.add_up_shared`), so that both are updated to the same numbers. The rank
of the stage that has that first name owns it (`Pipeline.owns`); the other ranks leave it out of norms and files.

Contract: the program fixes the shapes and dtypes that stages send. torch infers nothing, as that would take a forward
pass that changes batch statistics. Losses are the caller's, scaled; nothing is divided by the micro-batches.

Limits: under `fully_shard` the gradients of a stage stay whole until its last micro-batch. `_PipelineScheduleRuntime`
is a private name of torch's (2.13 to 2.15).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslc.compiler.ir.parameter_names import ParameterNames
from dslc.compiler.ir.program import JobProgram, PipelineStep, TensorParallelStep
from dslc.compiler.ir.tensor_styles import TensorStyle
from dslc.compiler.placement.axes import AXES
from dslc.compiler.placement.shares import largest
from dslc.compiler.trace.private_torch import (
    local_part,
    own_buffers,
    own_children,
    own_parameters,
    pipeline_runtime,
    run_microbatches,
    separate_tensors,
)
from dslc.compiler.trace.structures import Structure
from dslc.runtime.model.errors import LossError
from dslc.runtime.model.meta_model import Blank, Spot
from dslc.runtime.model.tensor_names import named_tensors, parameter_names
from dslc.runtime.parallel.engine import Engine, do_nothing
from dslc.runtime.parallel.mesh import Mesh
from dslc.runtime.pipeline.captured_parts import captured_parts
from dslc.runtime.pipeline.input_form import InputForm
from dslc.runtime.pipeline.stage import CapturedPart, CapturedStage, StageModule, enter_passes
from dslc.runtime.technique import compiling, offload
from dslc.runtime.technique.precision import autocast


def preload() -> None:
    """Imports the modules that every rank will need (1.3 s), in the process from which ranks are forked."""
    import torch.distributed.pipelining.schedules  # noqa: F401


# ------------------------------------------------------------------------------------------------------- the stages


@dataclass(kw_only=True)
class PipelineCut:
    """The part of the model that a rank keeps: `made` without the other ranks' layers, and `job` without their names.

    `parts` are the parts of a user's own module. `whole` are the tensors of the whole model, on the meta device, by
    name. `shared` are this rank's tensors that another rank has too: for each name the pipeline coordinates that have
    it, its owner first.
    """

    job: JobProgram
    made: Blank
    modules: dict[int, dict[str, nn.Module]]  # the layers, by the index of the stage
    parts: Mapping[int, CapturedPart]
    whole: Mapping[str, Tensor]
    names: ParameterNames  # of the whole model
    shared: Mapping[str, tuple[int, ...]]
    input_form: InputForm
    stand_ins: list[tuple[nn.Module, str, tuple[nn.Module, str]]] = field(default_factory=list)

    def name_shared(self) -> None:
        """Makes shared weights accessible under their first names too, now that they have numbers."""
        for owner, attribute, (original_owner, original) in self.stand_ins:
            setattr(owner, attribute, getattr(original_owner, original))


def cut(job: JobProgram, blank: Blank, coordinate: int, input_form: InputForm) -> PipelineCut:
    """Removes the layers that are not of `coordinate` from `made.module`, in place."""
    assert job.pipeline is not None
    all_tensors, all_names = named_tensors(blank.module), parameter_names(blank.module)
    own_stages = [stage for stage in job.pipeline.stages if stage.rank == coordinate]
    names = [name for stage in own_stages for name in stage.modules]
    modules = {
        stage.index: {name: blank.module.get_submodule(name) for name in stage.modules if name} for stage in own_stages
    }
    layer_modules = {id(part) for layers in modules.values() for layer in layers.values() for part in layer.modules()}
    modules_outside = _modules_outside_layers(job.pipeline, blank.module) if "" in names else {}
    kept_modules = layer_modules | {id(part) for part in modules_outside.values()}
    parts = (
        {}
        if job.model.root is not None
        else captured_parts(job, blank.module, input_form, [stage.index for stage in own_stages])
    )
    mine = {
        name: [spot for spot in all_spots if id(spot[0]) in kept_modules] for name, all_spots in blank.spots.items()
    }
    spots = {name: kept_spots for name, kept_spots in mine.items() if kept_spots}
    shared_ranks = _shared(job.pipeline, blank, spots)
    elsewhere = {name: kept_spots[0] for name, kept_spots in spots.items() if blank.spots[name][0] not in kept_spots}
    for part in parts.values():
        _hold(part, blank, spots, layer_modules)
    for index, part in parts.items():
        if "" in job.pipeline.stages[index].modules:
            _hold_spares(part, spots, layer_modules | {id(part.holder) for part in parts.values()})
    leads = [*filter(None, names), *(f"{path}." for path in modules_outside)]
    _prune(blank.module, leads, [name.rpartition(".")[0] for name in elsewhere])
    for removed in blank.module.modules():
        if id(removed) not in kept_modules:
            own_parameters(removed).clear()
            own_buffers(removed).clear()
    inits = tuple(init for init in blank.step.inits if init.parameter in spots)
    pipeline_cut = PipelineCut(
        job=_restricted(job, names),
        made=dataclasses.replace(blank, step=dataclasses.replace(blank.step, inits=inits), spots=spots),
        modules=modules,
        parts=parts,
        whole=all_tensors,
        names=all_names,
        shared=shared_ranks,
        input_form=input_form,
    )
    for name, spot in elsewhere.items():
        path, _, attribute = name.rpartition(".")
        pipeline_cut.stand_ins.append((blank.module.get_submodule(path), attribute, spot))
    return pipeline_cut


def _shared(step: PipelineStep, blank: Blank, spots: Mapping[str, list[Spot]]) -> dict[str, tuple[int, ...]]:
    """Returns the pipeline coordinates of each of the tied weights `spots` that several have."""
    holders = {name: _holders(step, blank.module, blank.spots[name]) for name in spots if len(blank.spots[name]) > 1}
    return {name: ranks for name, ranks in holders.items() if len(ranks) > 1}


def _modules_outside_layers(step: PipelineStep, model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules that belong to no layer, by path."""
    layers = [name for stage in step.stages for name in stage.modules if name]
    return {path: part for path, part in model.named_modules() if not _within(path, layers)}


def _hold(part: CapturedPart, blank: Blank, spots: dict[str, list[Spot]], layer_modules: set[int]) -> None:
    """Gives the tensors that a stage uses outside of layers a place: in a layer of this rank, or in its holder."""
    from dslc.runtime.pipeline.captured import tensors_used_by

    names = {id(getattr(*all_spots[0])): name for name, all_spots in blank.spots.items()}
    for number, reference in enumerate(tensors_used_by(part.codes)):
        owner = blank.module.get_submodule(reference.path)
        tensor = getattr(owner, reference.name)
        if id(owner) in layer_modules:
            part.places[reference] = (owner, reference.name)
            continue
        place = f"held{number}"
        if isinstance(tensor, nn.Parameter):
            part.holder.register_parameter(place, tensor)
        else:
            part.holder.register_buffer(place, tensor, persistent=False)
        part.places[reference] = (part.holder, place)
        # First, as engines know this place.
        spots.setdefault(names[id(tensor)], []).insert(0, part.places[reference])
        if blank.step.reset:
            spots[names[id(tensor)]].append((_snapshot(owner), reference.name))  # a module that can make its numbers


def _hold_spares(part: CapturedPart, spots: Mapping[str, list[Spot]], staged_modules: set[int]) -> None:
    """Gives unused parameters a place in this stage: engines know parameters of stages (`staged_modules`) alone."""
    for parameter_spots in spots.values():
        parameter_spots.sort(key=lambda spot: id(spot[0]) not in staged_modules)
        owner, attribute = parameter_spots[0]
        if id(owner) not in staged_modules and attribute in own_parameters(owner):
            place = f"spare{len(own_parameters(part.holder))}"
            part.holder.register_parameter(place, own_parameters(owner)[attribute])
            parameter_spots.insert(0, (part.holder, place))


def _snapshot(module: nn.Module) -> nn.Module:
    """Returns a copy of `module` as it is now, unaffected by later removals."""
    snapshot = copy.copy(module)
    separate_tensors(snapshot, module)
    return snapshot


def _holders(step: PipelineStep, model: nn.Module, spots: Sequence[Spot]) -> tuple[int, ...]:
    """Returns the pipeline coordinates that have a weight; the coordinate of its first place is first."""
    ranks = {
        id(part): stage.rank
        for stage in step.stages
        if "" in stage.modules
        for part in _modules_outside_layers(step, model).values()
    }
    for stage in step.stages:
        for name in filter(None, stage.modules):
            ranks |= {id(part): stage.rank for part in model.get_submodule(name).modules()}
    return tuple(dict.fromkeys(ranks[id(owner)] for owner, _ in spots))


def _prune(module: nn.Module, kept_paths: Sequence[str], empty_paths: Sequence[str], prefix: str = "") -> None:
    """Removes the modules outside `kept_paths` and on no way there; modules in `empty_paths` stay, empty."""
    for name, child in list(module.named_children()):
        full = prefix + name
        if full in kept_paths:
            continue
        if any(path.startswith(full + ".") for path in kept_paths):
            _prune(child, kept_paths, empty_paths, full + ".")
        elif any(path == full or path.startswith(full + ".") for path in empty_paths):
            empty = nn.Module()
            for path in empty_paths:
                if path.startswith(full + "."):
                    _make_path(empty, path[len(full) + 1 :])
            own_children(module)[name] = empty
        else:
            del own_children(module)[name]


def _make_path(module: nn.Module, path: str) -> None:
    head, _, tail = path.partition(".")
    if head not in own_children(module):
        module.add_module(head, nn.Module())
    if tail:
        _make_path(module.get_submodule(head), tail)


def _restricted(job: JobProgram, names: Sequence[str]) -> JobProgram:
    """Returns the program with only the names of modules that exist here."""

    def present_modules(modules: Sequence[str]) -> tuple[str, ...]:
        return tuple(module for module in modules if _within(module, names))

    return dataclasses.replace(
        job,
        draws=None,  # all modules draw as they should, also those whose code runs between layers
        # Frozen parameters are frozen already; weights that two stages share are summed, not tied.
        model=dataclasses.replace(job.model, frozen=(), ties=_ties(job, names)),
        tensor=job.tensor and dataclasses.replace(job.tensor, styles=_styles(job.tensor, names)),
        context=job.context
        and dataclasses.replace(job.context, attention=present_modules(job.context.attention), positions=False),
        recompute=dataclasses.replace(job.recompute, modules=present_modules(job.recompute.modules)),
        compiled=present_modules(
            tuple(name for name in job.compiled if name)
        ),  # "", the whole model, is handled by each stage
        gradients=dataclasses.replace(job.gradients, units=present_modules(job.gradients.units)),
    )


def _ties(job: JobProgram, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple(pair for pair in job.model.ties if all(_within(parameter, names) for parameter in pair))


def _styles(step: TensorParallelStep, names: Sequence[str]) -> tuple[tuple[str, TensorStyle], ...]:
    return tuple((module, style) for module, style in step.styles if _within(module, names))


def _within(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


# -------------------------------------------------------------------------------------------------------- the axis


def join(job: JobProgram, cut: PipelineCut, mesh: Mesh, device: torch.device) -> Pipeline:
    """Returns the pipeline over the stages that `cut` has kept."""
    step = job.pipeline
    assert step is not None
    offload_activations, last_stage = offload.activations(job, device), len(step.stages) - 1

    @contextlib.contextmanager
    def pass_context() -> Iterator[None]:
        with offload_activations(), autocast(job.precision, device):
            yield

    stages: dict[int, StageModule | CapturedStage] = {}
    for n, layers in cut.modules.items():
        trains = n > step.first_trained  # a stage before does
        if n in cut.parts:
            stages[n] = CapturedStage(
                step.stages[n], n == last_stage, layers, cut.parts[n], cut.made.module, pass_context, device, trains
            )
        else:
            stages[n] = StageModule(step.stages[n], n == last_stage, layers.values(), pass_context, trains)
    if "" in job.compiled:  # the whole model
        for stage in stages.values():
            compiling.apply(("",), stage, device, cut=job.tensor is not None)
    return Pipeline(
        step=step,
        stages=stages,
        mesh=mesh,
        device=device,
        whole=cut.whole,
        names=cut.names,
        shared=cut.shared,
        input_form=cut.input_form,
        unused=frozenset(job.gradients.unused),
    )


@dataclass(kw_only=True)
class Pipeline:
    """One rank's view of the pipeline. `stages` are its own, by index."""

    step: PipelineStep
    stages: Mapping[int, StageModule | CapturedStage]
    mesh: Mesh
    device: torch.device
    whole: Mapping[str, Tensor]
    names: ParameterNames  # of the whole model
    shared: Mapping[str, tuple[int, ...]]
    input_form: InputForm
    unused: frozenset[str] = frozenset()  # parameters without a gradient
    schedule: ScheduleRun | None = None  # of a training
    _sent: list[tuple[Any, Tensor]] = field(default_factory=list)
    _loss_names: list[str] | None = None  # the further losses of the first step

    def engine(self, engine: Engine, plain: nn.Module) -> Engine:
        """Returns `engine` for the stages of this rank: the norm of a gradient is over all stages."""
        remote_parameters = {id(tensor) for name, tensor in named_tensors(plain).items() if not self.owns(name)}

        def let_go() -> None:
            self.finish()
            engine.let_go()

        return dataclasses.replace(
            engine,
            shards=self.mesh.group(*AXES),
            counts=lambda parameter: id(parameter) not in remote_parameters and engine.counts(parameter),
            let_go=let_go,
        )

    @property
    def coordinate(self) -> int:
        return self.mesh.coordinates["pipeline"]

    @property
    def coordinates(self) -> int:
        """Number of coordinates of the axis."""
        return self.mesh.sizes["pipeline"]

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.mesh.group("pipeline")

    @property
    def last_stage(self) -> int:
        return len(self.step.stages) - 1

    @property
    def ends(self) -> bool:
        """True if this rank has the last stage, and so the losses."""
        return self.last_stage in self.stages

    @property
    def is_first_rank(self) -> bool:
        """True if this rank is the first of its pipeline coordinate."""
        return all(n == 0 for axis, n in self.mesh.coordinates.items() if axis != "pipeline")

    def peer(self, coordinate: int) -> int:
        """Returns the rank, among all, at another coordinate of this pipeline."""
        assert self.group is not None
        return dist.get_global_rank(self.group, coordinate)

    def owns(self, name: str) -> bool:
        """True if this rank counts and writes a tensor that it has."""
        return self.shared.get(name, (self.coordinate,))[0] == self.coordinate

    def owner(self, name: str) -> int:
        """Returns the pipeline coordinate that owns a tensor of the whole model."""
        stages = self.step.stages
        of_layer = (s.rank for s in stages for module in s.modules if module and name.startswith(module + "."))
        outside_layers = (s.rank for s in stages if "" in s.modules)
        return next(itertools.chain(of_layer, outside_layers))

    # ------------------------------------------------------------------------------------------ without gradients

    def forward(self, input: Structure) -> Structure:
        """Returns the model's output for the batch `input` on the ranks with the last stage; None elsewhere.

        All ranks of the pipeline call it with the same number of samples.
        """
        self.finish()
        leaves = inputs = self.input_form.tensors_of(input)
        samples = len(leaves[0])
        for index in sorted(self.stages):
            stage = self.stages[index]
            if index > 0 and index - 1 not in self.stages:
                source = self.peer(self.step.stages[index - 1].rank)
                inputs = tuple(self._received(samples, fact, source) for fact in stage.step.inputs)
            output = stage(*inputs, **self.stage_arguments(leaves))
            inputs = output if isinstance(output, tuple) else (output,)
            if index != self.last_stage and index + 1 not in self.stages:
                next_rank = self.peer(self.step.stages[index + 1].rank)
                self._sent += [(dist.isend(tensor, next_rank, group=self.group), tensor) for tensor in inputs]
        return self.restored(output, samples) if self.ends else None

    def restored(self, output: Structure, samples: int) -> Structure:
        """Returns what the last stage gives in the form in which the model gives it."""
        last_stage = self.stages[self.last_stage]
        return last_stage.restored(output, samples) if isinstance(last_stage, CapturedStage) else output

    def stage_arguments(self, input: tuple[Tensor, ...]) -> dict[str, tuple[Tensor, ...]]:
        """Returns the arguments of each stage besides the tensors it receives."""
        return {"input": input} if any(isinstance(stage, CapturedStage) for stage in self.stages.values()) else {}

    def _received(self, samples: int, fact: tuple[tuple[int, ...], str], source: int) -> Tensor:
        shape, dtype = fact
        received_tensor = torch.empty((samples, *shape), dtype=getattr(torch, dtype), device=self.device)
        dist.recv(received_tensor, source, group=self.group)
        return received_tensor

    def finish(self) -> None:
        """Waits until all pending sends have completed."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def to_rank_0(self, name: str, full_tensor: Tensor | None) -> Tensor | None:
        """Sends a tensor from the first rank of its owner to rank 0; returns it there, None elsewhere."""
        owner = self.owner(name)
        if not self.is_first_rank or self.coordinate not in (0, owner):
            return None
        if owner == 0:
            return full_tensor
        if self.coordinate == owner:
            assert full_tensor is not None
            # It may be in the host's memory, which NCCL cannot send from.
            dist.send(full_tensor.contiguous().to(self.device), self.peer(0), group=self.group)
            return None
        about = self.whole[name]
        received_tensor = torch.empty(about.shape, dtype=about.dtype, device=self.device)
        dist.recv(received_tensor, self.peer(owner), group=self.group)
        return received_tensor

    def further_losses(self, losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the further losses that the last stage has logged in a step; zeros under their names elsewhere."""
        if self._loss_names is None:
            names = [sorted(losses)]
            source = self.peer(self.step.stages[self.last_stage].rank)
            dist.broadcast_object_list(names, source, group=self.group, device=self.device)
            self._loss_names = names[0]
        if self.ends and sorted(losses) != self._loss_names:
            raise LossError(
                f"the losses {', '.join(sorted(losses)) or 'none'} are logged beside the loss, and in the first step "
                f"{', '.join(self._loss_names) or 'none'}",
                remedy="over a pipeline a loss gives the same further losses in each step",
            )
        return {name: losses.get(name, torch.zeros((), device=self.device)) for name in self._loss_names}

    # ---------------------------------------------------------------------------------------------- shared weights

    @torch.no_grad()
    def add_up_shared(self, tensors: Mapping[str, Tensor]) -> None:
        """Gives each rank that has a tied weight the sum of all its holders' gradients, added in one order."""
        for name, holders in self.shared.items():
            parameter = tensors[name]
            if not parameter.requires_grad or name in self.unused:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            target = local_part(parameter.grad)
            contribution = _with_all_rows(target, parameter)
            parts = {self.coordinate: contribution}
            exchanges = []
            for holder in holders:
                if holder != self.coordinate:
                    parts[holder] = torch.empty_like(contribution)
                    exchanges.append(dist.P2POp(dist.isend, contribution, self.peer(holder), self.group))
                    exchanges.append(dist.P2POp(dist.irecv, parts[holder], self.peer(holder), self.group))
            for work in dist.batch_isend_irecv(exchanges):
                work.wait()
            total = parts[holders[0]].clone()
            for holder in holders[1:]:
                total += parts[holder]
            target.copy_(total[: len(target)] if target.dim() else total)


def _with_all_rows(rows: Tensor, parameter: Any) -> Tensor:
    """Returns a rank's rows of a gradient, padded to the first rank's number: messages have equal shapes."""
    shares, missing_rows = 1, 0
    for dim, placement in enumerate(getattr(parameter, "placements", ())):
        shares *= parameter.device_mesh.size(dim) if getattr(placement, "dim", None) == 0 else 1
    if shares > 1:
        missing_rows = largest(parameter.shape[0], shares) - len(rows)
    return torch.cat([rows, rows.new_zeros(missing_rows, *rows.shape[1:])]) if missing_rows else rows.contiguous()


class ScheduleRun:
    """The passes of one step by torch's runtime. `loss` takes an output and a target, and starts the backward pass."""

    def __init__(self, pipeline: Pipeline, samples: int, microbatches: int, loss: Callable[[object, object], Tensor]):
        from torch.distributed.pipelining import PipelineStage

        step, self._pipeline = pipeline.step, pipeline
        self._stages = [
            PipelineStage(
                stage,
                index,
                len(step.stages),
                pipeline.device,
                input_args=_examples(stage.step.inputs, samples, grad=index > 0),
                output_args=_examples(stage.step.outputs, samples, grad=True),
                group=pipeline.group,
                # torch then computes all gradients where it would those of the inputs alone.
                dw_builder=_no_weights if index in step.whole_backward else None,
            )
            for index, stage in sorted(pipeline.stages.items())
        ]

        def of_output(output: object, target: object) -> Tensor:
            return loss(pipeline.restored(output, samples), target)

        self._runtime = pipeline_runtime(self._stages, microbatches, of_output, step.rows)
        pipeline.schedule = self
        if pipeline.device.type == "cuda":
            # NCCL connects a group at its first use, which takes all of its ranks; those that share a weight exchange
            # its gradients alone.
            dist.all_reduce(torch.zeros((), device=pipeline.device), group=pipeline.group)

    @property
    def received(self) -> Iterator[Tensor]:
        """Yields torch's receive buffers, which exist from the first step on."""
        for stage in self._stages:
            for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
                yield from (info.buffer for info in infos if info.buffer is not None)

    def run(
        self,
        micro: Sequence[tuple[Structure, Structure]],
        enter: Callable[[int], None],
        enter_backward: Callable[[], None] = do_nothing,
    ) -> None:
        """Runs the passes of micro-batches of equal size; `enter` begins a forward pass, `enter_backward` the other."""
        # torch's `step` takes a whole batch, which it would cut into these again.
        for stage in self._stages:
            stage.has_backward = True
            stage.clear_runtime_states()
            enter_passes(stage, enter, enter_backward)
        inputs, targets = (
            [self._pipeline.input_form.tensors_of(input) for input, _ in micro],
            [target for _, target in micro],
        )
        stage_arguments = [self._pipeline.stage_arguments(input) for input in inputs]
        run_microbatches(self._runtime, inputs, stage_arguments, targets)


def _no_weights() -> Callable[[], None]:
    """Returns the second half of a backward pass whose first half computes all gradients."""
    return do_nothing


def _examples(facts: Sequence[tuple[tuple[int, ...], str]], samples: int, *, grad: bool) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty((samples, *shape), dtype=getattr(torch, name), device="meta").requires_grad_(
            grad and getattr(torch, name).is_floating_point
        )
        for shape, name in facts
    )
