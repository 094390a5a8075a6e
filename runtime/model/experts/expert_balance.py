"""Balances the experts of a model by the tokens that each gets, and reads these counts.

Model: a router counts the tokens of each expert over the micro-batches of a step (`Router.load`). Before the update the
counts of all layers are summed over the ranks that hold other tokens, in one all-reduce. The bias of an expert then
grows by `rate` where its count is below the mean of its layer, and falls where it is above.

Contract: the counts are those of the global batch, so that a bias is the same on every rank and for every plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslc.compiler.ir.steps import ModuleStep
from dslc.runtime.model.experts.expert_modules import Router

EACH = 256  # experts of all layers, up to which a metric names each


class ExpertBalance:
    """The routers of a rank's part of the model `root`. `group` are the ranks that hold other tokens of the same
    layers.
    """

    def __init__(self, model: nn.Module, root: ModuleStep | None, group: dist.ProcessGroup | None) -> None:
        self.layers = list(_routers_in(root, "")) if root is not None else []
        self.routers = {name: module for name, module in model.named_modules() if isinstance(module, Router)}
        self._moving = [router for router in self.routers.values() if router.rate is not None]
        self._group = group

    def begin(self) -> None:
        """Begins to count for a step."""
        for router in self.routers.values():
            router.load.zero_()

    @torch.no_grad()
    def update(self) -> None:
        """Moves the biases by the tokens of the step."""
        if not self._moving:
            return
        counts = torch.cat([router.load for router in self._moving])
        if self._group is not None:
            dist.all_reduce(counts, group=self._group)
        sizes = [router.load.shape[0] for router in self._moving]
        for router, count in zip(self._moving, counts.split(sizes), strict=True):
            assert router.rate is not None and router.e_score_correction_bias is not None
            # In whole numbers, so that a count at the mean is exactly there.
            direction = (count.sum() - count * count.shape[0]).sign()
            router.e_score_correction_bias.add_(direction, alpha=router.rate)

    def counts(self) -> Tensor:
        """Returns the tokens that this rank has sent to each expert of all layers in the step, in order."""
        device = next(iter(self.routers.values())).load.device if self.routers else None
        counts = [
            self.routers[name].load.double() if name in self.routers else torch.zeros(experts, device=device).double()
            for name, experts in self.layers
        ]
        return torch.cat(counts)

    def loads(self, counts: Sequence[float]) -> dict[str, float]:
        """Returns the loads of the experts by name, given the counts of all ranks: 1 is an even share."""
        loads: dict[str, float] = {}
        rest = list(counts)
        for name, experts in self.layers:
            own, rest = rest[:experts], rest[experts:]
            even = max(sum(own), 1.0) / experts
            layer = name.removesuffix(".gate")
            loads |= {f"load.{layer}.{number}": count / even for number, count in enumerate(own)}
        extremes = {"load_max": max(loads.values()), "load_min": min(loads.values())}
        return extremes | (loads if len(loads) <= EACH else {})


def _routers_in(step: ModuleStep, path: str) -> Iterator[tuple[str, int]]:
    """Yields the routers below a module with their numbers of experts."""
    for child in step.children:
        name = f"{path}.{child.name}" if path else child.name
        if child.kind == ".Router":
            yield name, child.arguments["experts"]
        yield from _routers_in(child, name)
