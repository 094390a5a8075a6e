"""Compares the forward passes of the ranks of a data axis over the same samples.

Model: with the same samples and random numbers, all ranks run the same modules and compute the same numbers. A network
that depends on the rank, the name of a host or an environment variable breaks this. So each rank runs it on a few
samples of the first rank, as in training, and drops the graph. The ranks compare the modules that they call, and sums
over their outputs. Where they differ, more passes tell a rank from a number that nothing seeds: it differs from pass to
pass.

Contract: a difference is a RankOrderError on all ranks of the axis. It names the parameter or module, the ranks and the
lines of the user's code. Parameters, buffers, generators and plain attributes are as they were before.

Limits: networks that are not small (step/model_state.py) are not compared, as these are copied; nor are stages of a
pipeline, nor weights that differ by design. The loss is not compared.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslc.compiler.ir.program import JobProgram, RankPlace
from dslc.compiler.trace.private_torch import local_part
from dslc.compiler.trace.structures import Structure, call, flatten, tensors, unflatten
from dslc.runtime.measure import collectives
from dslc.runtime.measure.rank_order import call_text, different_use, module_of, place_of_call
from dslc.runtime.parallel.context_parallel import piece_of
from dslc.runtime.parallel.mesh import mesh_of
from dslc.runtime.process import random_numbers
from dslc.runtime.step.assemble import TrainingComponents
from dslc.runtime.step.model_state import is_small, preserve_model
from dslc.runtime.technique.precision import autocast

ROWS = 4  # samples of a pass, at most
_PASSES = 8  # more passes of each rank, where the first ones differ
_ROUNDING = 1e-3

NOTES = (
    "with the same samples and random numbers, each rank has to compute what one process computes. The forward pass "
    "depends on something else that differs between ranks: their number, the name of a host, an environment variable",
    "let all ranks take the same path, or choose it by the samples or by random numbers",
)


@dataclass(frozen=True)
class CalledModules:
    """The modules that a forward pass called, each with a line of the user's code, and two sums over each output."""

    calls: tuple[tuple[str, str], ...]
    sums: Tensor

    @property
    def path(self) -> list[str]:
        return [name for name, _ in self.calls]

    def first_difference(self, another: CalledModules) -> int | None:
        """Returns the place of the first call that differs from another pass; None if none does."""
        for place, (one, two) in enumerate(zip(self.path, another.path, strict=False)):
            if one != two or not _is_close(self.sums[place], another.sums[place]):
                return place
        return None if len(self.path) == len(another.path) else min(len(self.path), len(another.path))


class ForwardCheck:
    """Compares forward passes over the same samples. All ranks make it; `after_pass` follows each, `fail` raises."""

    def __init__(
        self,
        job: JobProgram,
        place: RankPlace,
        parts: TrainingComponents,
        after_pass: Callable[[], None],
        fail: Callable[..., NoReturn],
    ) -> None:
        self._job, self._rank, self._parts = job, place.rank, parts
        self._after_pass, self._fail = after_pass, fail
        self._names = {id(module): name for name, module in parts.plain.named_modules()}
        exchange = parts.exchange
        on = (
            job.world_size > 1
            and job.model.root is None
            and job.own_step is None
            and not (job.observation is not None and job.observation.exact)  # its samples are made float64 in each step
            and parts.pipeline is None
            and not (exchange is not None and exchange.differ)
            and is_small(parts)
        )
        self._group = mesh_of(job).group("data") if on else None
        self._other_axes = mesh_of(job).group("context", "tensor") if on else None

    def compare(self, input: Structure) -> None:
        """Raises RankOrderError if the forward passes of the ranks differ; `input` is the input of a micro-batch."""
        if self._group is None:
            return
        eager: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self._job.compiled:
            eager = torch.compiler.set_stance("force_eager")
        with collectives.exclude_collectives(), preserve_model(self._parts), eager:
            input = self._shared(input)
            if input is None:
                return
            one = self._run(input)
            if not self._any_differ(one):
                return
            more_runs = [self._run(input) for _ in range(_PASSES)]
            self._report(one, steady=all(one.first_difference(run) is None for run in more_runs))

    # ------------------------------------------------------------------------------------------------- one pass

    def _shared(self, input: Structure) -> Structure:
        """Returns the first rank's samples in this rank's classes; None where other leaves than tensors differ."""
        leaves, form = flatten(input[:ROWS] if isinstance(input, Tensor) else input)
        shared = [[leaf.detach().cpu() if isinstance(leaf, Tensor) else None for leaf in leaves]]
        dist.broadcast_object_list(shared, group=self._group, group_src=0)
        differ = torch.tensor(int(len(shared[0]) != len(leaves)), device=self._parts.device)
        dist.all_reduce(differ, dist.ReduceOp.MAX, group=self._group)
        if bool(differ):
            return None
        pairs = zip(shared[0], leaves, strict=True)
        return unflatten(
            [own_tensor if of_0 is None else of_0.to(self._parts.device) for of_0, own_tensor in pairs], form
        )

    def _run(self, input: Structure) -> CalledModules:
        plain, cut = self._parts.plain, piece_of(self._job)
        calls: list[tuple[str, str]] = []
        sums: list[Tensor] = []

        def note(module: nn.Module, _: object, output: object) -> None:
            calls.append((self._names.get(id(module), ""), place_of_call()))
            sums.append(_sums(output, self._parts.device))

        # Within shared experts each rank works on other rows.
        shared = tuple(f"{name}." for name, _ in self._job.experts.layers) if self._job.experts is not None else ()
        compared = [module for name, module in plain.named_modules() if not name.startswith(shared)]
        handles = [module.register_forward_hook(note) for module in compared]
        random_numbers.begin(self._job.seed, 0)
        try:
            with torch.enable_grad(), autocast(self._job.precision, self._parts.device):
                call(plain, plain.forward, input) if self._job.data.structured else plain(cut(input))
        finally:
            for handle in handles:
                handle.remove()
        self._after_pass()
        self._parts.engine.let_go()
        return CalledModules(tuple(calls), torch.stack(sums))

    # ------------------------------------------------------------------------------------------------- between ranks

    def _any_differ(self, one: CalledModules) -> bool:
        """True if ranks of this data axis, or of one beside it, differ: passes need the ranks of all axes."""
        differ = torch.tensor(int(not self._agrees(one)), device=self._parts.device)
        if self._other_axes is not None:
            dist.all_reduce(differ, dist.ReduceOp.MAX, group=self._other_axes)
        return bool(differ)

    def _agrees(self, one: CalledModules) -> bool:
        digest = hashlib.blake2b("\n".join(one.path).encode(), digest_size=6).digest()  # exact in float64
        path = torch.tensor([int.from_bytes(digest)], dtype=torch.float64, device=self._parts.device)
        both = torch.stack((path, -path))
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self._group)
        if bool((both[0] != -both[1]).any()):
            return False
        both = torch.stack((one.sums, -one.sums))
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self._group)
        return all(_is_close(high, -low) for high, low in zip(*both.cpu(), strict=True))

    def _report(self, one: CalledModules, *, steady: bool) -> None:
        """Raises RankOrderError if two ranks differ whose own passes are alike."""
        of_all: list[Any] = [None] * dist.get_world_size(self._group)
        mine = {"rank": self._rank, "steady": steady, "calls": one.calls, "sums": one.sums.cpu()}
        dist.all_gather_object(of_all, mine, group=self._group)
        ranks = [observation for observation in of_all if observation["steady"]]
        for another in ranks[1:]:
            passes = [CalledModules(observation["calls"], observation["sums"]) for observation in (ranks[0], another)]
            if (place := passes[0].first_difference(passes[1])) is not None:
                self._fail(of_all[0]["rank"], *self._difference(place, ranks[0], another), notes=NOTES)

    def _difference(self, place: int, one: dict[str, Any], another: dict[str, Any]) -> tuple[str, str]:
        """Returns the message on two ranks whose calls differ from `place` on, and the module that they part at."""
        uses = [self._use(observation) for observation in (one, another)]
        if set(uses[0]["used"]) != set(uses[1]["used"]):
            text, parameter = different_use(*uses)
            return f"the ranks use different parameters for the same samples: {text}", module_of(parameter)
        calls = [
            observation["calls"][place] if place < len(observation["calls"]) else None for observation in (one, another)
        ]
        named = [
            {
                "rank": observation["rank"],
                "used": [] if module_call is None else None,
                "name": module_call and module_call[0],
                "place": module_call and module_call[1],
            }
            for observation, module_call in zip((one, another), calls, strict=True)
        ]
        module = next(module_call[0] for module_call in calls if module_call is not None)
        if named[0]["name"] == named[1]["name"]:
            named_place = f"`{module}`" if module else "the network"
            line = f" ({calls[0][1]})" if calls[0] and calls[0][1] else ""
            ranks = f"on rank {one['rank']} and on rank {another['rank']}"
            return f"{named_place}{line} gives different numbers {ranks} for the same samples", module
        texts = ", ".join(call_text(each) for each in named)
        return f"the ranks run different modules for the same samples: {texts}", module

    def _use(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Returns the parameters of the modules that a rank has called, in the order of the model."""
        places = dict(observation["calls"])
        used = [name for name, _ in self._parts.plain.named_parameters() if module_of(name) in places]
        return {"rank": observation["rank"], "used": used, "places": places}


def _sums(output: object, device: torch.device) -> Tensor:
    """Returns the sum of the numbers of an output, and the sum of their magnitudes."""
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for tensor in tensors(output):
        if tensor.is_floating_point():
            local = local_part(tensor.detach()).nan_to_num()
            sums += torch.stack((local.sum(dtype=torch.float64), local.abs().sum(dtype=torch.float64)))
    return sums


def _is_close(one: Tensor, another: Tensor) -> bool:
    return bool((one - another).abs().max() <= _ROUNDING * torch.maximum(one[1], another[1]).abs())
