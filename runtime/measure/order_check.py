"""Compares, in some steps, the order in which ranks come to their collectives, before each of them.

Model: collectives of a step follow from the modules that run and from the parameters that the loss depends on. Ranks
that differ in either would add up tensors that do not belong together, or wait for ever. So the tensors of the model
are compared once. Each module that exchanges something is announced before it runs. The parameters of a loss are
announced before its backward pass (or before the end of the network, if parameters may differ). An announcement is an
all-reduce of two numbers, the digest of a text and its negative: the maxima agree only if all digests do.

Contract: a difference is a RankOrderError on each of the ranks, before any rank exchanges anything else. It names the
module or the parameter, the ranks and the lines of the user's code. In all other steps no hook is there and nothing is
done: `is_due` is a few comparisons. The steps are the first `FIRST` of a process, those whose number is a power of two,
and the first after an evaluation or generated texts; and the first evaluation, up to `LIMIT` modules in each. All steps
of a network that is known to vary are compared if it has synchronised batch norms.

Networks that are known to vary agree on the parameters of each step by themselves (parallel/unused_parameters.py). One
pass over the same samples and random numbers (forward_check.py) finds whether ranks differ in anything else. It runs in
the first step, and in each of these steps if the parameters that a step uses may differ.

Limits: modules inside of a compiled one are not announced. They exchange something on the tensor axis, or as
synchronised batch norms. A reentrant checkpoint of a user's own hides some.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dslc.compiler.ir.program import JobProgram, RankPlace
from dslc.compiler.trace.structures import tensors
from dslc.runtime.data.batches import StepBatch
from dslc.runtime.measure import collectives
from dslc.runtime.measure.forward_check import ForwardCheck
from dslc.runtime.measure.rank_order import (
    DIFFERENT_ORDER,
    RankOrderError,
    call_text,
    different_use,
    module_of,
    more,
    place_of_call,
)
from dslc.runtime.parallel.mesh import mesh_of
from dslc.runtime.parallel.unused_parameters import graph_nodes, leaves
from dslc.runtime.process.job_line import mark_errors
from dslc.runtime.step.assemble import TrainingComponents
from dslc.runtime.technique.batch_norm import is_synchronised

FIRST = 4  # steps of a process that are all compared
LIMIT = 1000  # modules announced in one step or evaluation

T = TypeVar("T")


class OrderCheck:
    """Compares what the ranks of one job call and use. Made by all of them."""

    def __init__(self, job: JobProgram, place: RankPlace, parts: TrainingComponents) -> None:
        self._job, self._rank, self._parts = job, place.rank, parts
        self._names = {id(module): name for name, module in parts.plain.named_modules()}
        self._parameters: dict[int, str] = {id(parameter): name for name, parameter in parts.plain.named_parameters()}
        self._places: dict[str, str] = {}  # of each module that was called: the line of the user's code
        self._handles: list[RemovableHandle] = []
        self._first = True  # no evaluation has been compared
        self._evaluated = False  # or generated texts, since the last step
        self._done = self._left = self._micro = 0
        mesh = mesh_of(job) if job.world_size > 1 and job.own_step is None else None
        groups = [mesh.group("data", "context"), mesh.group("tensor")] if mesh is not None else []
        self._groups = [group for group in groups if group is not None]
        self._on = bool(self._groups) and job.gradients.kind != "local"
        # Where numbers decide, each step finds the parameters that it used, and ranks may differ in them.
        varies = job.gradients.search and not job.gradients.unused
        summed = job.gradients.kind in ("ddp", "zero1", "fsdp")
        self._compares_use = (summed or job.tensor is not None) and not varies
        by_name = dict(parts.plain.named_modules())
        compiled = [by_name[name] for name in job.compiled if name in by_name]
        # The hooks of a compiled module itself are outside of what torch compiles.
        self._inside = {
            id(submodule) for module in compiled for submodule in module.modules() if submodule is not module
        }
        self._announced = self._modules_with_collectives() if self._on else []
        self._always = varies and any(is_synchronised(module) for module in self._announced)
        self._forward = ForwardCheck(job, place, parts, self._announce_end, self._end)
        self._compare_models()

    def is_due(self, step: int) -> bool:
        """True if the next step, `step` counted from 1, is compared."""
        if not self._on:
            return False
        self._done += 1
        return self._always or self._done <= FIRST or self._evaluated or step & (step - 1) == 0

    def run(self, work: Callable[[StepBatch], T], batch: StepBatch) -> T:
        """Does a step that is compared."""
        self._evaluated = False
        with self._compared():
            if self._done == 1 or self._job.gradients.search:
                self._forward.compare(batch.micro[0][0])
            return work(batch)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Compares the first evaluation, and the step after each."""
        self._evaluated = True
        if not self._on or not self._first:
            yield
            return
        self._first = False
        with self._compared():
            yield

    def note_generation(self) -> None:
        """Has the next step compared, as passes of generated texts came before it."""
        self._evaluated = True

    def loss(self, inner: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """Returns `inner`, followed by the comparison of the parameters that the loss depends on."""
        if not self._on or self._parts.pipeline is not None or not (self._compares_use or self._announced):
            return inner

        def both(loss: Tensor) -> None:
            inner(loss)
            if not self._handles:
                return
            if self._compares_use:
                self._micro += 1
                self._announce_use([loss])
            else:
                self._announce_end()

        return both

    # ------------------------------------------------------------------------------------------------- in a step

    @contextlib.contextmanager
    def _compared(self) -> Iterator[None]:
        self._left, self._micro = LIMIT, 0
        self._add_hooks()
        try:
            yield
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    def _add_hooks(self) -> None:
        plain, stages = self._parts.plain, self._stages
        for module in plain.modules():
            if id(module) not in self._inside and any(True for _ in module.parameters(recurse=False)):
                self._handles.append(module.register_forward_pre_hook(self._see))
        for module in self._announced:
            # Before the hook of `fully_shard`, which gathers; and after it, when its parameters are there.
            self._handles.append(module.register_forward_pre_hook(self._announce_module, prepend=True))
            self._handles.append(module.register_forward_pre_hook(self._see_whole))
        for stage in stages if self._compares_use else ():
            self._handles.append(stage.register_forward_hook(self._see_output))
        if not self._handles:
            self._handles.append(plain.register_forward_pre_hook(_do_nothing))

    @property
    def _stages(self) -> list[nn.Module]:
        axis = self._parts.pipeline
        return list(axis.stages.values()) if axis is not None else []

    def _modules_with_collectives(self) -> list[nn.Module]:
        """Returns the modules that exchange something when they run, in the order of the model."""
        job, plain = self._job, self._parts.plain
        synchronised: dict[nn.Module, None] = {}
        if job.gradients.kind == "fsdp":
            from torch.distributed.fsdp import FSDPModule

            synchronised |= dict.fromkeys(module for module in plain.modules() if isinstance(module, FSDPModule))
        named = [name for name, _ in job.tensor.styles] if job.tensor is not None else []
        named += job.context.attention if job.context is not None else ()
        by_name = dict(plain.named_modules())
        synchronised |= dict.fromkeys(by_name[name] for name in named if name in by_name)
        if job.sync_batch_norm:
            synchronised |= dict.fromkeys(module for module in plain.modules() if is_synchronised(module))
        return [module for module in plain.modules() if module in synchronised and id(module) not in self._inside]

    def _see(self, module: nn.Module, _: object) -> None:
        self._places[self._names[id(module)]] = place_of_call()

    def _see_whole(self, module: nn.Module, _: object) -> None:
        """Notes the parameters of a module, which are gathered now."""
        start = self._names[id(module)]
        for name, parameter in module.named_parameters():
            self._parameters[id(parameter)] = f"{start}.{name}" if start else name

    def _announce_module(self, module: nn.Module, _: object) -> None:
        if is_synchronised(module) and not module.training:
            return  # it exchanges nothing, and ranks may evaluate unequal numbers of batches
        name = self._names[id(module)]
        if self._left > 0:
            self._left -= 1
            self._compare(f"calls {name}", lambda: {"name": name, "place": place_of_call(), "used": None})

    def _announce_end(self) -> None:
        """Compares the end of the network with the modules that another rank may still call."""
        if self._announced:
            self._compare("ends", lambda: {"name": None, "place": "", "used": []})

    def _see_output(self, module: nn.Module, _: object, output: object) -> None:
        outputs = [tensor for tensor in tensors(output) if tensor.requires_grad]
        if outputs and torch.is_grad_enabled():
            self._announce_use(outputs)

    def _announce_use(self, outputs: list[Tensor]) -> None:
        names = {self._parameters[leaf] for leaf in leaves(*outputs) if leaf in self._parameters}
        used = [name for name in dict.fromkeys(self._parameters.values()) if name in names]
        self._compare(
            f"uses {' '.join(used)}",
            lambda: {
                "name": None,
                "place": "",
                "used": used,
                "places": {name: place for name, place in self._places.items() if place},
            },
        )
        self._hold_all_used(used, outputs)

    def _hold_all_used(self, used: list[str], outputs: list[Tensor]) -> None:
        """Raises RankOrderError if no rank uses a parameter that DistributedDataParallel waits for."""
        job = self._job
        is_final = self._micro == job.microbatches and job.gradients.kind in ("ddp", "zero1")
        if (
            not is_final
            or job.gradients.static_graph
            or job.gradients.search
            or not outputs[0].requires_grad
            or _hides_parameters(outputs)
        ):
            return
        trained = [name for name, parameter in self._parts.plain.named_parameters() if parameter.requires_grad]
        missing = [name for name in trained if name not in set(used) | set(job.gradients.unused)]
        if missing:
            self._end(
                0,
                f"the loss does not depend on `{missing[0]}`{more(missing)}, whose gradient is summed in each step",
                module_of(missing[0]),
            )

    def _compare_models(self) -> None:
        """Compares names, shapes and dtypes of all tensors, in the model's order."""
        named = [*self._parts.plain.named_parameters(), *self._parts.plain.named_buffers()]
        lines = [f"`{name}` {tuple(tensor.shape)} {str(tensor.dtype)[6:]}" for name, tensor in named]
        self._compare(" ".join(lines), lambda: {"name": None, "used": None, "tensors": lines})

    # ------------------------------------------------------------------------------------------------- between ranks

    def _compare(self, event: str, make_report: Callable[[], dict[str, Any]]) -> None:
        digest = int.from_bytes(hashlib.blake2b(event.encode(), digest_size=7).digest())
        for group in self._groups:
            word = torch.tensor([digest, -digest], device=self._parts.device)
            with collectives.exclude_collectives():
                dist.all_reduce(word, dist.ReduceOp.MAX, group=group)
                high, low = word.tolist()
                if high != -low:
                    self._differ(group, {"rank": self._rank, **make_report()})

    def _differ(self, group: dist.ProcessGroup, mine: dict[str, Any]) -> NoReturn:
        of_all: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(of_all, mine, group=group)
        one = of_all[0]
        if "tensors" in mine:
            another = next(report for report in of_all if report["tensors"] != one["tensors"])
            pairs = itertools.zip_longest(one["tensors"], another["tensors"], fillvalue="none")
            number, pair = next((n, pair) for n, pair in enumerate(pairs, 1) if pair[0] != pair[1])
            text = f"the ranks made different models: tensor {number} is {pair[0]} on rank {one['rank']}"
            self._end(one["rank"], f"{text} and {pair[1]} on rank {another['rank']}", "")
        another = next(report for report in of_all if (report["name"], report["used"]) != (one["name"], one["used"]))
        if one["used"] is None or another["used"] is None:
            modules = [report["name"] for report in (one, another) if report["name"] is not None]
            text = f"{call_text(one)}, {call_text(another)}"
            self._end(one["rank"], f"the ranks run different modules: {text}", modules[0])
        text, parameter = different_use(one, another)
        self._end(one["rank"], f"the ranks use different parameters in this step: {text}", module_of(parameter))

    def _end(self, rank: int, message: str, module: str, notes: Sequence[str] = DIFFERENT_ORDER) -> NoReturn:
        python = self._job.model.python
        with mark_errors(python.line if python is not None else ""):
            raise RankOrderError(message, is_reported=self._rank == rank, module=module, notes=notes)


def _hides_parameters(outputs: list[Tensor]) -> bool:
    """True if a function of a user's own is in the graph, which may use parameters that the graph does not show."""
    return any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in graph_nodes(*outputs))


def _do_nothing(*_: object) -> None:
    pass
