"""Sharded parameters, gradients and optimizer state: torch's `fully_shard`, set up as the program says.

Model: the ranks that hold the same part of the model (mesh.py) are a mesh of `replicas` x shards. Each parameter is a
DTensor, and a rank keeps some of its rows (`Shard(0)`: equal pieces, the last ones shorter or empty); if the tensor
axis has cut it before (tensor_parallel.py), some rows of its share. Experts that ranks share (expert_parallel.py) have
a smaller mesh within the same unit. A unit is a module that the program names, or the root with the rest. One
all-gather gathers its parameters before it runs, and one reduce-scatter sums its gradients, in 16 bits if the job says
so (rounded_sums.py). Under O2 a 16-bit copy is gathered, and gradients are summed in float32.

Contract: gradients are sums over the ranks, so that a loss needs no scale. `shard` takes a model on the meta device and
leaves it there; `place` then fills in one value, and a rank keeps only its rows of it. Parameters are DTensors whenever
no pass is running. Between the micro-batches of a step

    reshard       parameters are freed after each pass (ZeRO-3)
    neither       parameters stay gathered; gradients are reduce-scattered at each micro-batch (ZeRO-2)
    accumulate    parameters stay gathered, gradients whole; they are reduce-scattered at the last (ZeRO-1)

and over several replicas the rows of a gradient are summed at the last micro-batch only.

Limits: the ranks use the same parameters in each micro-batch. A parameter has at least one dimension; those that train
have one dtype. The strides of a non-contiguous parameter are lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslc.compiler.ir.program import JobProgram
from dslc.compiler.placement.axes import AXES
from dslc.compiler.trace.private_torch import spec_of
from dslc.compiler.trace.structures import Structure, tensors
from dslc.runtime.model.errors import ModelError
from dslc.runtime.model.initial_weights import part_of
from dslc.runtime.model.meta_model import job_line
from dslc.runtime.parallel import expert_parallel, float8_gather, per_module_sharding
from dslc.runtime.parallel.engine import Engine, all_count, buffers_of_rank_0, do_nothing
from dslc.runtime.parallel.mesh import Mesh, mesh_of
from dslc.runtime.parallel.rounded_sums import round_sums
from dslc.runtime.technique import offload

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

# Imported inside functions: torch.distributed.fsdp takes 0.6 s to import, and the first use of its tensors as much
# again, which a training without sharding does not pay.


def preload() -> None:
    """Imports the modules that every rank will need, in the process from which ranks are forked."""
    import torch.distributed.fsdp  # noqa: F401


def shard(job: JobProgram, model: nn.Module, device: torch.device, roots: Sequence[nn.Module] = ()) -> Engine:
    """Shards `model`, which is on the meta device, in place. Raises ModelError for a module that torch cannot shard.

    `roots` are the modules that are called separately, the stages of a pipeline; by default the model itself. Where a
    step is the user's own they are the parts of the model, which are gathered until their update
    (per_module_sharding.py).
    """
    preload()
    _check(job, model)
    if device.type == "cuda":
        torch.cuda.init()  # or the mesh would choose a device other than the rank's
    axes, stepping = mesh_of(job), job.own_step is not None
    unsharded = per_module_sharding.whole_parameters(model) if stepping else set()
    if stepping:
        parts = (part for _, part in per_module_sharding.parts_of(model))
        roots = tuple(part for part in parts if not unsharded.issuperset(part.parameters()))
    elif not roots:
        roots = (model,)
    mesh = axes.sharded(job.gradients.replicas, device)
    units = _shard_modules(job, model, roots, mesh, device, unsharded)

    def let_go() -> None:
        for unit in units:
            unit.reshard()

    updates = float8_gather.apply(job.precision, model, roots or (model,), mesh.get_group(mesh.ndim - 1))
    agree = buffers_of_rank_0(model, axes.group("data", "context")) if mesh.size() > 1 else do_nothing

    def begin_step() -> None:
        for update in (*([agree] if job.moves_buffers else []), *updates):
            update()

    return Engine(
        model=model,
        held=lambda: _defer_exchange(job, units),
        lockstep=mesh.size() > 1,
        shards=_shards(axes, mesh),
        counts=_counts(axes, mesh) if not stepping else _counts_of_parts(mesh),
        let_go=let_go,
        agree_on_buffers=do_nothing if job.sync_batch_norm and not stepping and not job.moves_buffers else agree,
        begin_step=begin_step,
    )


def _shard_modules(
    job: JobProgram,
    model: nn.Module,
    roots: Sequence[nn.Module],
    mesh: DeviceMesh,
    device: torch.device,
    unsharded: set[nn.Parameter],
) -> list[FSDPModule]:
    """Shards the modules that the step names, then the roots, without the parameters `unsharded`. Returns the units of
    `fully_shard`, each with its settings for a step.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    step, stepping = job.gradients, job.own_step is not None
    low = getattr(torch, job.precision.dtype) if job.precision.level == "O2" else None
    wide = torch.float32 if low is not None else None
    placement = expert_parallel.placement(mesh_of(job), step.replicas) if job.experts is not None else None
    common: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": offload.policy(job, device),
        "shard_placement_fn": placement,
    }
    inner = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=wide)

    def shard_with_outputs(module: nn.Module, **settings: Any) -> None:
        around = _OutputExposer()
        module.register_forward_hook(around.expose_tensors)
        fully_shard(module, **settings)
        module.register_forward_hook(around.restore_output)

    for name in step.units:
        module = model.get_submodule(name)
        shard_with_outputs(module, reshard_after_forward=step.reshard, mp_policy=inner, **common)
    # The backward pass needs the root again at once, but torch's default frees it.
    outer = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=wide, output_dtype=wide)
    for root in roots:
        last = getattr(root, "last", True)  # of a stage: its output goes to the loss, not to another stage
        policy = outer if last else inner
        after = step.reshard if stepping else None if step.reshard else False
        shard_with_outputs(
            root, reshard_after_forward=after, mp_policy=policy, ignored_params=unsharded or None, **common
        )
    modules = (module for root in roots for module in root.modules())
    units: list[FSDPModule] = [module for module in modules if isinstance(module, FSDPModule)]
    if step.exchange is not None:
        round_sums(step.exchange.kind, mesh, units)
    for unit in units:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # without it gloo is asked for an operation that it lacks
        if stepping:
            unit.set_reshard_after_backward(False, recurse=False)
    return units


class _OutputExposer:
    """Shows `fully_shard` the tensors inside an output of another class, for its backward pass."""

    def __init__(self) -> None:
        self._beside = False

    def expose_tensors(self, module: nn.Module, given: object, output: object) -> object:
        self._beside = not isinstance(output, Tensor | tuple | list | dict)
        found = tensors(output) or tensors(dict(getattr(output, "__dict__", {}))) if self._beside else []
        return (output, found) if self._beside else output

    def restore_output(self, module: nn.Module, given: object, output: Structure) -> object:
        return output[0] if self._beside else output


def _shards(axes: Mesh, mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Returns the group of ranks that together have all rows of all gradients."""
    if axes.root is not None:
        return axes.group(*AXES)
    return mesh.get_group(mesh.ndim - 1) if mesh.size(mesh.ndim - 1) > 1 else None


def _counts(axes: Mesh, mesh: DeviceMesh) -> Callable[[Tensor], bool]:
    """Returns a function: true of a gradient if this rank counts its rows, of all ranks that hold the same ones."""
    if axes.root is None:
        return all_count

    def counts(parameter: Any) -> bool:
        names = parameter.device_mesh.mesh_dim_names
        replicas = [name for name in names if name.endswith("replicas")]
        first = all(parameter.device_mesh.get_local_rank(name) == 0 for name in replicas)
        shared = "tensor" in names and parameter.placements[names.index("tensor")].is_shard()
        return first and (shared or axes.leads)

    return counts


def _counts_of_parts(mesh: DeviceMesh) -> Callable[[Tensor], bool]:
    """Returns whether this rank of a replica counts a gradient: its rows and, on the first, whole parameters."""
    first = mesh.get_local_rank(mesh.ndim - 1) == 0
    return lambda parameter: first or hasattr(parameter, "to_local")


def _check(job: JobProgram, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0 and job.own_step is None:
            raise ModelError(
                f"{job_line(job.model)}`{name}` is a single number without a dimension, which has no rows to be sharded"
            )
    dtypes = {str(parameter.dtype)[6:] for parameter in model.parameters() if parameter.requires_grad}
    if len(dtypes) > 1:
        raise ModelError(
            f"{job_line(job.model)}parameters that train have to be of one dtype to be sharded, and these are of "
            + " and ".join(sorted(dtypes))
        )


@contextlib.contextmanager
def _defer_exchange(job: JobProgram, units: Sequence[FSDPModule]) -> Iterator[None]:
    """Defers the exchange of a micro-batch that is not the last."""
    _exchange(job, units, last=False)
    yield
    _exchange(job, units, last=True)


def _exchange(job: JobProgram, units: Sequence[FSDPModule], last: bool) -> None:
    step = job.gradients
    for unit in units:
        if step.accumulate:
            unit.set_requires_gradient_sync(last, recurse=False)
        elif step.replicas > 1:
            unit.set_requires_all_reduce(last, recurse=False)
        if not step.reshard:
            unit.set_reshard_after_backward(last, recurse=False)


def place(value: Tensor, old: Tensor, device: torch.device, home: torch.device) -> Tensor:
    """Returns a copy of the part of `value` that this rank keeps in the place of `old`.

    `value` is the whole tensor, the same on all ranks; `old` a sharded parameter on the meta device, whose rows go to
    `home`, or a buffer, which goes to `device`.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(old, DTensor):
        return value.to(device, copy=True)
    # Not `from_local`, which would move the rows to the mesh's device.
    own = value[part_of(old)].to(home, copy=True, memory_format=torch.contiguous_format)
    return DTensor(own, spec_of(old), requires_grad=False)
