"""Torch's private names in use: each exists, and behaves as its one file describes."""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from helpers.gang import gang
from helpers.private_names import private_names
from torch import nn

from dslc.compiler.trace import private_torch as pt
from dslc.compiler.trace.fake_tensor_mode import FakeTensorMode, detect_fake_mode
from dslc.compiler.trace.flops import formulas


@pytest.mark.slow
def test_no_other_file_uses_one() -> None:
    assert private_names() == []


@pytest.mark.parametrize("place", pt.OVERRIDDEN)
def test_what_subclasses_override_is_there(place: str) -> None:
    module, _, name = place.partition(":")
    kind = getattr(importlib.import_module(module), name)
    assert [each for each in pt.OVERRIDDEN[place] if not callable(getattr(kind, each, None))] == []


def test_what_a_checkpoint_runs_again_is_the_first_argument_of_a_function() -> None:
    begin = getattr(torch.utils.checkpoint, pt.CHECKPOINT)
    assert next(iter(inspect.signature(begin).parameters)) == "fn"


def test_the_history_of_a_gpus_memory_is_there() -> None:
    recording = inspect.signature(pt.record_memory_history).parameters
    assert {"enabled", "max_entries"} <= set(recording)
    assert next(iter(inspect.signature(pt.dump_memory_snapshot).parameters)) == "filename"


def test_the_insides_of_a_module() -> None:
    module = nn.BatchNorm1d(3)
    assert dict(module.named_parameters()) == pt.own_parameters(module)
    assert dict(module.named_buffers()) == pt.own_buffers(module)
    assert list(pt.own_children(nn.Sequential(module))) == ["0"]
    mappings = [pt.own_parameters(module), pt.own_buffers(module), pt.own_children(module)]
    assert [vars(module)[name] for name in pt.MODULE_MAPPINGS] == mappings
    pt.own_parameters(module)["weight"] = torch.ones(3) * 2  # type: ignore[assignment]
    assert module.weight.tolist() == [2, 2, 2], "a plain tensor in the place of a parameter"
    other = copy.copy(module)
    pt.separate_tensors(other, module)
    pt.own_parameters(other)["bias"] = None
    assert module.bias is not None and other.bias is None
    assert isinstance(nn.BatchNorm3d(1), pt.AnyBatchNorm) and isinstance(nn.Dropout2d(), pt.AnyDropout)


def test_the_insides_of_a_tensor() -> None:
    whole = torch.zeros(4, 2)
    row = whole[1]
    assert pt.storage_identity(row) == pt.storage_identity(whole) != pt.storage_identity(whole.clone())
    before = pt.times_written(whole)
    row.add_(1)
    assert pt.times_written(whole) == before + 1
    assert pt.is_view(row) and not pt.is_view(whole)
    assert pt.base_of(row) is whole and pt.base_of(whole) is None
    assert pt.local_part(row) is row and not pt.is_distributed(row)
    before = pt.holders(whole)
    saved = whole.new_ones(4, 2, requires_grad=True) * whole  # autograd keeps it, in C++
    assert pt.holders(whole) > before and saved.requires_grad
    for sparse in (torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr(), torch.eye(2).to_sparse_csc()):
        values, *indices = pt.storages_of(sparse)
        assert values._cdata == pt.storage_identity(sparse) == pt.storage_identity(sparse.detach())
        assert values.nbytes() == 2 * 4 and sum(place.nbytes() for place in indices) >= 4 * 8


def test_lists_of_tensors() -> None:
    tensors = [torch.full((3,), 2.0), torch.full((2,), 4.0)]
    pt.scale_all(tensors, torch.tensor(0.5))
    assert [t[0].item() for t in tensors] == [1, 2]
    limited = [torch.tensor([-3.0, 3.0]), torch.tensor([0.5])]
    pt.lower_all(limited, 1.0)
    pt.raise_all(limited, -2.0)
    assert [t.tolist() for t in limited] == [[-2, 1], [0.5]]
    assert [n.item() for n in pt.norms(tensors, math.inf)] == [1, 2]
    found = torch.zeros(1)
    pt.unscale_all(tensors, found, torch.tensor([3.0]))
    assert [t[0].item() for t in tensors] == [3, 6] and not found.item()
    pt.unscale_all([torch.tensor([math.inf])], found, torch.tensor([3.0]))
    assert found.item() == 1
    leaves, form = pt.tree_flatten({"a": [1, (2, 3)]})
    assert leaves == pt.tree_leaves({"a": [1, (2, 3)]}) == [1, 2, 3]
    assert pt.tree_unflatten(leaves, form) == {"a": [1, (2, 3)]}
    assert pt.tree_map_only(int, lambda n: n + 1, ["a", 1]) == ["a", 2]


def test_operators_and_fake_tensors() -> None:
    seen: list[Any] = []
    numbers: list[int | None] = []

    class Watch(pt.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            numbers.append(pt.running_node_number())
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    first = pt.next_node_number()
    with Watch():
        x.double().sum().backward()
    assert pt.next_node_number() >= first + 2
    casts = [func for func in seen if pt.is_cast(func)]
    assert casts and pt.schema_of(casts[0]).name == "aten::_to_copy"
    assert pt.schema_of(casts[0]).arguments[0].name == "self"
    assert pt.overloads_of(torch.ops.aten.add.Tensor) is torch.ops.aten.add and pt.overloads_of(len) is len
    assert numbers[0] is None and {number for number in numbers if number is not None} >= {first, first + 1}
    assert {pt.flash_attention_on_cpu, pt.flash_attention_on_cpu_backward} <= formulas().keys()
    assert all(hasattr(torch.ops.aten, name) for name in pt.ATTENTION)
    with FakeTensorMode() as fake:
        made = torch.zeros(3)
        assert detect_fake_mode([made]) is fake
        with pytest.raises(pt.DataDependentOutputException):
            made[0].item()
        with pytest.raises(pt.DynamicOutputShapeException):
            made.nonzero()
        with pt.unset_fake_temporarily():
            assert torch.ones(1).item() == 1


def _distributed(rank: int) -> None:
    from torch.distributed._functional_collectives import all_gather_tensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "context"))
    flat = pt.flattened(mesh["data", "context"], "shards")
    assert flat.size() == 2
    assert pt.unflattened(flat, (1, 2), ("a", "b")).mesh_dim_names == ("a", "b")
    group = flat.get_group()
    assert pt.group_named(group.group_name) is group
    whole = torch.arange(5.0)
    shared = distribute_tensor(whole, flat, [Shard(0)])
    assert pt.is_distributed(shared) and pt.local_part(shared).tolist() == [[0, 1, 2], [3, 4]][rank]
    assert [list(each) for each in pt.part_in_whole(shared)] == [[[3], [0]], [[2], [3]]][rank]
    again = DTensor(pt.local_part(shared), pt.spec_of(shared), requires_grad=False)
    assert again.full_tensor().tolist() == whole.tolist()
    own = torch.full((1,), float(rank), requires_grad=True)
    gathered = pt.gather_with_gradient(own, 0, group)
    gathered.sum().backward()
    assert gathered.tolist() == [0, 1] and own.grad is not None and own.grad.tolist() == [2]
    late: Any = all_gather_tensor(own.detach(), 0, group)
    assert pt.is_on_its_way(late) and not pt.is_on_its_way(late.wait())
    into = torch.empty(2)
    pt.gather_into(into, own.detach(), 2, group.group_name)
    torch.ops._c10d_functional.wait_tensor(into)
    assert into.tolist() == [0, 1]
    assert pt.FUNCTIONAL_COLLECTIVES in pt.COLLECTIVE_SPACES


def test_process_groups_and_shares() -> None:
    gang(2, _distributed)


def _replicas(rank: int) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = nn.Linear(1, 1, bias=False)
    unit = fully_shard(module, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")))
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
    pt.sum_over_replicas_in(unit, dist.new_group([rank], use_local_synchronization=True))
    module(torch.full((1, 1), rank + 1.0)).sum().backward()
    assert module.weight.grad is not None and pt.local_part(module.weight.grad).item() == rank + 1


def test_replicas_of_shards_sum_in_the_group_that_is_given() -> None:
    gang(2, _replicas)


def test_pickled_tensors_name_what_is_listed() -> None:
    import pickle
    import pickletools

    texts = [
        str(argument)
        for opcode, argument, _ in pickletools.genops(pickle.dumps(nn.Parameter(torch.zeros(2)), protocol=2))
        if opcode.name == "GLOBAL"
    ]
    named = {(module, name) for module, name in (text.split() for text in texts) if module.startswith("torch")}
    listed = {(module, name) for module, names in pt.PICKLED_TENSORS.items() for name in names}
    assert named - {("torch.serialization", "_get_layout")} <= listed | {pt.PICKLED_STORAGE}
    assert pt.PICKLED_STORAGE in named


def test_signatures_of_what_only_a_run_calls() -> None:
    from torch.distributed import distributed_c10d
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, _Action, _PipelineScheduleRuntime

    assert callable(_Action.from_str)
    takes = list(inspect.signature(_PipelineScheduleRuntime._step_microbatches).parameters)
    assert takes[1:4] == ["arg_mbs", "kwarg_mbs", "target_mbs"] and "return_outputs" in takes
    assert {"loss_fn", "scale_grads"} <= inspect.signature(PipelineScheduleMulti.__init__).parameters.keys()
    assert issubclass(distributed_c10d._unpickler, __import__("pickle").Unpickler)
    source = inspect.getsource(LocalElasticAgent.__init__) + inspect.getsource(LocalElasticAgent._start_workers)
    assert "self._pcontext" in source and "self._rdzv_handler" in source
    assert pt.fake_store() is not None


WITHOUT_COMPILER = """
import sys
import torch
from dslc.compiler.trace.instantiate import mode_without_memory
from dslc.compiler.trace.private_torch import COMPILER, COMPILER_MARK, REFERENCES
from types import FunctionType
def marked():
    modules = [module for name, module in sys.modules.items() if name.startswith(REFERENCES)]
    values = [value for module in modules for value in list(vars(module).values()) if isinstance(value, FunctionType)]
    functions = [value.__wrapped__ for value in values if hasattr(value, "__wrapped__")]
    return [function for function in functions if getattr(function, COMPILER_MARK, None) is function]
@torch.library.custom_op("of_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x
class Import:
    in_place = None  # whether a stand-in is there when the compiler's import begins
    def find_spec(self, name, path=None, target=None):
        if name == COMPILER:
            self.in_place = "_dynamo" in vars(torch)
with mode_without_memory() as mode:
    network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.GELU(), torch.nn.Dropout(0.1))
    (network(torch.empty(2, 3)).softmax(1) * 2).var().backward()
assert mode.cache_enabled and network[0].weight.grad.shape == (4, 3)
assert torch._dynamo.disable(torch.nn.Module.forward) is torch.nn.Module.forward and double(torch.ones(1)) == 2
sys.meta_path.insert(1, seen := Import())
assert COMPILER not in sys.modules and marked()
{first}  # what the stand-in does not answer
assert torch._dynamo is sys.modules[COMPILER] and not marked() and seen.in_place is False
torch._dynamo.config.suppress_errors = True
assert torch._dynamo.config.fake_tensor_cache_enabled
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
from torch._dynamo import config
assert config is sys.modules["torch._dynamo.config"] and config.suppress_errors and mode_without_memory().cache_enabled
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "first",
    [
        "assert torch._dynamo.is_compiling() is False",
        "assert torch._dynamo.disable(lambda x: x)._torchdynamo_disable",
    ],
)
def test_modes_without_memory_leave_the_compiler_out(first: str) -> None:
    """Until the user's code asks for it."""
    subprocess.run([sys.executable, "-c", WITHOUT_COMPILER.replace("{first}", first)], check=True)


COMPILER = """
import sys
from types import ModuleType
import torch
from dslc.compiler.trace import private_torch as pt
from dslc.compiler.trace.fake_tensor_mode import FakeTensorMode, detect_fake_mode
stand_in = ModuleType("stand_in")
pt.put_in_place_of_compiler(stand_in)
assert torch._dynamo is stand_in and pt.COMPILER not in sys.modules
pt.take_away(stand_in)
pt.compiler_settings()
assert pt.COMPILER in sys.modules
settings = pt.compiler_settings()
for name in ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit"):
    assert hasattr(settings, name), name
assert pt.COMPILER_SETTINGS == {name: getattr(settings, name) for name in pt.COMPILER_SETTINGS}
assert pt.default_compile_cache()
assert pt.has_triton() in (True, False)
assert pt.has_cpp_compiler()
import torch._compile, inspect
assert pt.COMPILER_MARK in inspect.getsource(torch._compile._disable_dynamo)
found = []
given = torch.ones(2, requires_grad=True)
pt.trace_backward(lambda x: [(x * x).sum()], [given], lambda *divided: found.append(divided))
((graph, outputs),) = found
assert outputs == 1 and graph.graph.find_nodes(op="placeholder")
"""


@pytest.mark.processes
def test_the_compiler() -> None:
    """Runs in a process of its own, which has not loaded it."""
    subprocess.run([sys.executable, "-c", COMPILER], check=True)


class _Asking(torch.utils.data.IterableDataset[bool]):
    def __iter__(self) -> Iterator[bool]:
        yield torch.utils.data.get_worker_info() is None
        pt.hide_worker()
        yield torch.utils.data.get_worker_info() is None


@pytest.mark.processes
def test_a_worker_that_is_hidden() -> None:
    loader = torch.utils.data.DataLoader(_Asking(), batch_size=None, num_workers=1, multiprocessing_context="fork")
    assert list(loader) == [False, True]


def test_a_fake_tensor_is_asked_for_its_device() -> None:
    """The answer is torch's, also to autograd, which asks for itself; the question is no operation."""
    seen: list[Any] = []

    def act(func: Any, args: Any, kwargs: Any) -> Any:
        seen.append(func)
        return func(*args, **kwargs)

    fake = FakeTensorMode()
    with fake:
        weight = torch.ones(4, 3, requires_grad=True)
    with fake, pt.OperationMode(act):
        made = torch.nn.functional.linear(torch.ones(2, 3), weight)
        made.sum().backward()
        assert made.device == torch.device("cpu") and weight.grad is not None and weight.grad.device == made.device
    assert torch.ops.aten.mm.default in seen and torch.ops.prim.device.default not in seen


@pytest.mark.parametrize("first, second", [((8, 16), (2, 16, 8)), ((4, 8), (8, 12)), ((2, 4, 8), (2, 8, 12))])
def test_products_of_groups_in_float32(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    a, b, ends = torch.randn(first), torch.randn(second), torch.tensor([4, 8], dtype=torch.int32)
    given: dict[str, Any] = {} if len(first) == len(second) == 3 else {"offs": ends}
    wanted = pt.GROUPED_PRODUCT(a, b, **given)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        found = pt.GROUPED_PRODUCT(torch.empty(first), torch.empty(second), **given)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)


def test_a_backward_pass_begins_with_a_gradient_that_it_leaves_as_it_is() -> None:
    weight, factor = torch.ones(3, requires_grad=True), torch.full((), 0.25)
    for _ in range(2):
        pt.run_engine((weight.sum(),), (factor,), False, False, (), allow_unreachable=True, accumulate_grad=True)
    assert weight.grad is not None and weight.grad.tolist() == [0.5] * 3
    assert factor.item() == 0.25
