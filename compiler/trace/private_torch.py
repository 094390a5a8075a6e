"""All of torch's private names that dslc uses, each under a plain name with its purpose.

They work with torch 2.13.0, 2.14.1 and 2.15.0, as tests/compiler/trace/test_private_torch.py holds. The tracer and the
runtime use no others. What `import torch` does not load is imported inside functions: it takes up to a second.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode as find_fake_mode
from torch._ops import OpOverload as Operator
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorDeviceMismatchError,
    unset_fake_temporarily,
)
from torch._subclasses.fake_tensor import FakeTensorMode as TorchFakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager as on_meta_device
from torch.autograd.graph import _engine_run_backward as run_engine
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.nn.modules.dropout import _DropoutNd as AnyDropout
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import (
    MappingKey,
    TreeSpec,
    register_dataclass,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)
from torch.utils._pytree import keystr as path_text

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from torch._C._profiler import _ProfilerEvent
    from torch._ops import OpOverloadPacket
    from torch.distributed import ProcessGroup, Store
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
    from torch.distributed.pipelining.stage import _PipelineStageBase
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.fx import GraphModule

__all__ = [  # of what is not defined here
    "AnyBatchNorm",  # the class of every batch normalisation
    "AnyDropout",  # the class of every dropout
    "DataDependentOutputException",  # the value of a fake tensor is asked for
    "FakeTensor",  # a tensor without memory
    "FakeTensorDeviceMismatchError",  # an operation takes fake tensors of two devices
    "DynamicOutputShapeException",  # a shape depends on the values of a fake tensor
    "TorchFakeTensorMode",  # makes tensors without memory (fake_tensor_mode.py)
    "find_fake_mode",  # the mode that fake tensors among others belong to
    "on_meta_device",  # fake tensors are tensors of the meta device inside
    "Operator",  # an operation as a dispatch mode sees it, such as `aten.add.Tensor`
    "TorchDispatchMode",  # sees every operation
    "TreeSpec",  # the form of a tree
    "path_text",  # the place of a leaf, as in `["boxes"][0]`
    "register_dataclass",  # makes the fields of a class's objects parts of a tree
    "run_engine",  # a backward pass that begins with given gradients
    "unset_fake_temporarily",  # real tensors inside a fake mode
    # Nested lists, tuples and mappings as their leaves and their form:
    "tree_flatten", "tree_flatten_with_path", "tree_leaves", "tree_map_only", "tree_unflatten",
]  # fmt: skip

Argument: TypeAlias = Any  # of an operation: a tensor, a number, a name, a list of them or None
Arguments: TypeAlias = tuple[Argument, ...]
Options: TypeAlias = Mapping[str, Argument]  # arguments by keyword

OVERRIDDEN = {
    # Starts the ranks, and looks after them: the launcher opens gates and looks at its board there.
    "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent": (
        "_start_workers",
        "_monitor_workers",
    ),
    # Divides gradients by the scale and finds infinities: the ranks agree on them there.
    "torch.amp:GradScaler": ("_unscale_grads_",),
    # False: torch calls the mode's `__torch_dispatch__` directly (FakeTensorMode, OperationMode).
    "torch.utils._python_dispatch:TorchDispatchMode": ("_should_skip_dynamo",),
    # Refuses an input of the wrong number of dims.
    "torch.nn:BatchNorm2d": ("_check_input_dim",),
}


def register_mapping(kind: type) -> None:
    """Makes the values of a mapping's class parts of a tree; it is made again from a dict of them."""
    _register_entries(kind, dict, kind)


def register_namespace(kind: type) -> None:
    """Makes the attributes of a plain object's class, as `SimpleNamespace`, parts of a tree."""
    _register_entries(kind, vars, lambda attributes: kind(**attributes))


def _register_entries(
    kind: type, entries: Callable[[Any], dict[Any, Any]], restore: Callable[[dict[Any, Any]], object]
) -> None:
    register_pytree_node(
        kind,
        lambda value: (list(entries(value).values()), list(entries(value))),
        lambda values, keys: restore(dict(zip(keys, values, strict=True))),
        flatten_with_keys_fn=lambda value: (
            [(MappingKey(key), part) for key, part in entries(value).items()],
            list(entries(value)),
        ),
    )


# ------------------------------------------------------------------------------------------------ a module's insides


def hide_worker() -> None:
    """Makes `torch.utils.data.get_worker_info()` return None in a worker, so that a stream is not dealt out again."""
    from torch.utils.data._utils import worker

    worker._worker_info = None


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Returns the mapping itself of a module's own parameters. It takes plain tensors too, which `setattr` refuses."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Returns the mapping itself of a module's own buffers."""
    return module._buffers


def own_children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Returns the mapping itself of a module's own children."""
    return module._modules


def separate_tensors(copy: nn.Module, module: nn.Module) -> None:
    """Gives a shallow copy of `module` mappings of its own, so that replacing a tensor of one leaves the other."""
    copy._parameters, copy._buffers = dict(module._parameters), dict(module._buffers)


def sharded_module(owner: object) -> str | None:
    """Returns the module whose parameters an object of `fully_shard` gathers; None for another object."""
    return cast("str | None", inspect.getattr_static(owner, "_module_fqn", None))


MODULE_MAPPINGS = ("_parameters", "_buffers", "_modules")  # the attributes of a module that hold them

# ------------------------------------------------------------------------------------------------ a tensor's insides
holders = Tensor._use_count  # type: ignore[attr-defined]  # the number of those that hold a tensor: Python is one


def storage_identity(tensor: Tensor) -> int:
    """Returns the identity of a tensor's memory, valid while the tensor is alive; fake tensors have one too."""
    return cast("int", storages_of(tensor)[0]._cdata)


def storages_of(tensor: Tensor) -> list[torch.UntypedStorage]:
    """Returns the pieces of a tensor's memory: of a sparse one its values, and then its indices."""
    if tensor.layout == torch.strided:
        return [tensor.untyped_storage()]
    with torch.no_grad():
        if tensor.layout == torch.sparse_coo:
            parts = [tensor._values(), tensor._indices()]
        elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = [tensor.values(), tensor.crow_indices(), tensor.col_indices()]
        else:
            parts = [tensor.values(), tensor.ccol_indices(), tensor.row_indices()]
    return [part.untyped_storage() for part in parts]


def times_written(tensor: Tensor) -> int:
    """Returns autograd's count of how often the tensor was written to in place."""
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    """Returns True for a view, as autograd sees it."""
    return tensor._is_view()


def base_of(tensor: Tensor) -> Tensor | None:
    """Returns the tensor that this is a view of, by autograd's records."""
    return tensor._base


def is_distributed(tensor: object) -> bool:
    """Returns True for a DTensor, without importing torch.distributed.tensor."""
    return hasattr(tensor, "_local_tensor")


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor, and any other tensor itself; `to_local` takes as long as copying a small
    tensor, and is seen by autograd."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def spec_of(tensor: Tensor) -> DTensorSpec:
    """Returns how a DTensor is laid over its mesh, from which another can be made: DTensor(part, spec, …)."""
    return cast("DTensor", tensor)._spec


def takes_scale(optimizer: torch.optim.Optimizer) -> bool:
    """True if GradScaler leaves it to the kernels of an optimizer to skip a step, without waiting for the device."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def let_take_scale(optimizer: torch.optim.Optimizer) -> None:
    """Makes GradScaler set `grad_scale` and `found_inf` of an optimizer before its step, and call the step always."""
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def part_in_whole(tensor: Tensor) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the shape of this rank's part of a DTensor and its offset in the whole."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    distributed = cast("DTensor", tensor)
    return compute_local_shape_and_global_offset(tensor.shape, distributed.device_mesh, distributed.placements)


# ------------------------------------------------------------------------------------- operations on lists of tensors

scale_all = torch._foreach_mul_  # multiplies each in place, by a number or another tensor
lower_all = torch._foreach_clamp_max_  # takes the smaller of each number and the limit, in place
raise_all = torch._foreach_clamp_min_  # the larger
norms = torch._foreach_norm  # the norm of each
roots = torch._foreach_sqrt  # the square root of each
signs = torch._foreach_sign  # -1, 0 or 1 for each
take_signs = torch._foreach_sign_  # the same, in place
sums = torch._foreach_add  # the sum of each and another, times `alpha`
add_all = torch._foreach_add_  # adds to each in place
divide_all = torch._foreach_div_  # divides each in place
moved = torch._foreach_lerp  # each after a share of the way to another
approach_all = torch._foreach_lerp_  # moves each by a share of the way to another, in place
step_by_quotients = torch._foreach_addcdiv_  # adds to each the quotient of two others, times a number, in place
unscale_all = torch._amp_foreach_non_finite_check_and_unscale_  # multiplies each in place, and marks infinities
record_memory_history = torch.cuda.memory._record_memory_history  # of a GPU's allocator
dump_memory_snapshot: Callable[[str], None] = torch.cuda.memory._dump_snapshot  # writes that history

# ------------------------------------------------------------------------------------------------ operators, autograd
number_of = torch.ops.aten._local_scalar_dense.default  # the operator behind `.item()`
flash_attention_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_on_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

ATTENTION = (  # the operators that attention comes down to, by device
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
COLLECTIVE_SPACES = ("c10d", "_c10d_functional", "_dtensor")  # where operators that are collectives are registered


def schema_of(operator: Operator) -> torch.FunctionSchema:
    """Returns an operator's name and arguments."""
    return operator._schema


def overloads_of(operator: object) -> OpOverloadPacket:
    """Returns the operator that has this overload, as `aten.add` has `aten.add.Tensor`, or the function itself."""
    return cast("OpOverloadPacket", getattr(operator, "_overloadpacket", operator))


def is_cast(operator: Operator) -> bool:
    """Returns True for the operator that changes the dtype of tensors."""
    name: str = operator._overloadpacket.__name__
    return name == "_to_copy"


def is_composite(operator: Operator) -> bool:
    """Returns True for an operator that is made of others."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")


def without_torch_function() -> AbstractContextManager[None]:
    """Makes subclasses of tensors, and modes, not see calls of torch's functions inside."""
    return torch._C.DisableTorchFunction()


GROUPED_PRODUCT = torch.ops.aten._grouped_mm  # products of the rows of each group with its own matrix
_QUANTIZE = torch.ops.aten.quantize_per_tensor
QUANTIZING = (_QUANTIZE.default, _QUANTIZE.tensor_qparams, _QUANTIZE.tensors)
_DEVICE = torch.ops.prim.device.default  # the question for a tensor's device, which its metadata answers


class OperationMode(TorchDispatchMode):
    """Hands each operation to `act(func, args, kwargs)`, which does it and returns its result. Questions for a device
    are no operations: autograd asks two for each, and fake tensors are asked here without torch's whole way to them.
    """

    def __init__(self, act: Callable[[Operator, Arguments, Options], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._act = act

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as for FakeTensorMode

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Sequence[type],
        args: Arguments = (),
        kwargs: Options | None = None,
    ) -> object:
        if func is not _DEVICE:
            return self._act(func, args, kwargs or {})
        (tensor,) = args
        if not isinstance(tensor, FakeTensor):
            return func(tensor)
        return torch.device("meta") if tensor.fake_mode.in_kernel_invocation else tensor.fake_device


def next_node_number() -> int:
    """Returns the number that the next node of autograd's graph gets in this thread."""
    return torch.autograd._get_sequence_nr()


def running_node_number() -> int | None:
    """Returns the number of the node whose backward pass is running, if one is."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def is_allocation(event: _ProfilerEvent) -> bool:
    """Returns True for an event of the profiler that is an allocation or a release."""
    from torch._C._profiler import _EventType

    return bool(event.tag == _EventType.Allocation)


# ----------------------------------------------------------------------------------------------------- process groups


def flattened(mesh: DeviceMesh, name: str | None = None) -> DeviceMesh:
    """Returns the axes of a mesh as one axis."""
    return mesh._flatten(name)


def unflattened(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Returns the one axis of a mesh as several."""
    return mesh._unflatten(0, sizes, names)


def sum_over_replicas_in(unit: FSDPModule, group: ProcessGroup) -> None:
    """Makes a unit of `fully_shard` sum over this group where it would over its replicas."""
    for parameters in unit._get_fsdp_state()._fsdp_param_groups:
        parameters.mesh_info.replicate_process_group = group  # type: ignore[attr-defined]  # a mesh with replicas


def fully_shard_over(mesh: DeviceMesh, takes: Callable[[Tensor], bool]) -> Callable[[Tensor], object]:
    """Returns the function that gives `fully_shard` this mesh, of shards or replicas x shards, for some parameters."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult

    info = FSDPMeshInfo(mesh, 0) if mesh.ndim == 1 else HSDPMeshInfo(mesh, 1, 0)
    chosen = ShardPlacementResult(placement=None, mesh_info=info)
    return lambda parameter: chosen if takes(parameter) else None


def group_named(name: str) -> torch.distributed.ProcessGroup:
    """Returns the process group as functional collectives know it."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)  # type: ignore[arg-type]  # a NewType since 2.13


def gather_with_gradient(tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Gathers the tensors of a group along a dim; the gradient is scattered back."""
    from torch.distributed._functional_collectives import all_gather_tensor_autograd

    gathered: Tensor = all_gather_tensor_autograd(tensor, gather_dim=dim, group=group)
    return gathered


def is_on_its_way(output: object) -> bool:
    """Returns True for the result of a functional collective that has not been waited for."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return isinstance(output, AsyncCollectiveTensor)


FUNCTIONAL_COLLECTIVES = "_c10d_functional"  # the operators behind DTensor and the functional collectives


def gather_into(full_tensor: Tensor, part: Tensor, ranks: int, group: object) -> None:
    """Starts the functional all-gather into one tensor."""
    torch.ops._c10d_functional.all_gather_into_tensor_out(part, ranks, group, out=full_tensor)


def unpickle_objects_with(unpickler: type) -> None:
    """Makes torch's object collectives use this class to read pickles."""
    from torch.distributed import distributed_c10d

    distributed_c10d._unpickler = unpickler  # type: ignore[assignment]


# What a pickled tensor names: harmless functions, and the one that reads a storage, which would load any pickle.
PICKLED_TENSORS = {"torch._utils": {"_rebuild_tensor_v2", "_rebuild_parameter"}, "torch.serialization": {"_get_layout"}}
PICKLED_STORAGE = ("torch.storage", "_load_from_bytes")


def fake_store() -> Store:
    """Returns the store of process groups whose collectives return their own input."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def worker_processes(agent: LocalElasticAgent) -> list[BaseProcess]:
    """Returns the processes that an elastic agent has started; none before it has."""
    context = agent._pcontext
    processes = getattr(context, "_pc", None)  # of a context of functions
    return [] if processes is None else list(processes.processes)


def leave_rendezvous(agent: LocalElasticAgent) -> None:
    """Shuts down an elastic agent's rendezvous."""
    agent._rdzv_handler.shutdown()


# ---------------------------------------------------------------------------------------------------------- pipelines


def pipeline_runtime(
    stages: Sequence[_PipelineStageBase],
    microbatches: int,
    loss: Callable[[Tensor, Tensor], Tensor],
    rows: Sequence[Sequence[str]],
) -> _PipelineScheduleRuntime:
    """Returns torch's runtime of a pipeline for a table of actions, a row for each coordinate; it adds the messages. No
    public class takes a table.
    """
    from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

    runtime = _PipelineScheduleRuntime(list(stages), microbatches, loss_fn=loss, scale_grads=False)
    runtime.pipeline_order = {rank: [_Action.from_str(action) for action in row] for rank, row in enumerate(rows)}
    runtime._prepare_schedule_with_comms(runtime.pipeline_order)
    return runtime


def run_microbatches(
    runtime: _PipelineScheduleRuntime,
    inputs: list[Arguments],
    keywords: list[dict[str, Argument]],
    targets: list[Tensor],
) -> None:
    """Runs the table over micro-batches; the public `step` takes a whole batch, which it cuts itself."""
    runtime._step_microbatches(inputs, keywords, targets, return_outputs=False)


# ----------------------------------------------------------------------------------------------------- torch.compile

COMPILER = "torch._dynamo"  # the module that torch.compile needs, and that much of torch imports at its first use
COMPILER_SETTINGS: dict[str, object] = {  # the settings that modes without memory read, and recomputation
    "fake_tensor_cache_enabled": True,
    "fake_tensor_cache_crosscheck_enabled": False,
    "_custom_ops_profile": None,
    "error_on_nested_fx_trace": True,
}
REFERENCES = ("torch._decomp", "torch._prims", "torch._refs")  # modules of operations in Python: fake kernels
CHECKPOINT = "_checkpoint_without_reentrant_generator"  # of torch.utils.checkpoint: is given what runs a second time
COMPILER_MARK = "__dynamo_disable"  # the attribute in which torch._compile._disable_dynamo caches its result


def compiler_settings() -> Any:
    """Returns the compiler's settings, to read and to set. Imports the compiler."""
    import torch._dynamo

    return torch._dynamo.config


def custom_operator_functions() -> list[object]:
    """Returns the functions of operators that are written in Python, such as some of torch's collectives."""
    from torch._library.custom_ops import OPDEFS

    return [
        function for operator in list(OPDEFS.values()) for function in getattr(operator, "_backend_fns", {}).values()
    ]


def put_in_place_of_compiler(stand_in: ModuleType) -> None:
    """Makes torch find `stand_in` where it looks for its compiler."""
    vars(torch)["_dynamo"] = stand_in


def take_away(stand_in: ModuleType) -> None:
    """Undoes it."""
    if vars(torch).get("_dynamo") is stand_in:
        del vars(torch)["_dynamo"]


def default_compile_cache() -> str:
    """Returns the folder in which torch keeps compiled code unless another is set, and precompiled headers and some
    pickles always.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder: str = default_cache_dir()
    return folder


def has_triton() -> bool:
    """Returns True if code can be compiled for a GPU."""
    from torch.utils._triton import has_triton

    return has_triton()


def has_cpp_compiler() -> bool:
    """Returns True if code can be compiled for a CPU."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return False
    return True


def compile_graph(
    graph: GraphModule, inputs: Sequence[Any], decompositions: Mapping[Any, Any], change: Callable[..., None]
) -> Callable[..., object]:
    """Compiles a graph with further decompositions, and by what `change` makes of it; torch's cache knows neither."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table

    with config.patch(enable_autograd_cache=False):
        table, patches = {**select_decomp_table(), **decompositions}, {"joint_custom_pre_pass": change}
        return cast("Callable[..., object]", compile_fx(graph, inputs, config_patches=patches, decompositions=table))


def exchange_in_pieces(group: ProcessGroup) -> None:
    """Makes the compiler exchange the pieces of a product by symmetric memory of the group, while it multiplies others.
    Torch (2.13) marks the second function as one that need not be called; its compiler asks whether it was.
    """
    from torch._inductor import config
    from torch.distributed import _symmetric_memory

    config._micro_pipeline_tp = True
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        _symmetric_memory.enable_symm_mem_for_group(group.group_name)


def trace_backward(
    function: Callable[..., list[Tensor]], tensors_given: Sequence[Tensor], divided: Callable[[GraphModule, int], None]
) -> None:
    """Traces a function as the compiler does, and calls `divided` with the forward graph and its number of outputs."""
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def divide(
        joint: GraphModule, inputs: Sequence[object], *, num_fwd_outputs: int, **options: Argument
    ) -> tuple[GraphModule, GraphModule]:
        halves = min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)
        divided(halves[0], num_fwd_outputs)
        return halves

    compilers: dict[str, Any] = {"fw_compiler": lambda graph, _: graph, "bw_compiler": lambda graph, _: graph}
    table = select_decomp_table()
    aot_function(function, partition_fn=divide, decompositions=table, **compilers)(*tensors_given)
