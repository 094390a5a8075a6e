"""Balances the experts of a model by the tokens that each gets, and reads these counts.

Model: a router counts the tokens of each expert over the micro-batches of a step (`Router.load`). Before the update the
counts of all layers are summed over the ranks that hold other tokens, in one all-reduce. The bias of an expert then
grows by `rate` where its count is below the mean of its layer, and falls where it is above.

A balance loss is `factor * experts * sum_e f_e P_e` of a layer: `f_e` are the tokens of expert e over all tokens, `P_e`
is its mean probability. `f_e` has no gradient, so that the gradient of each token's probability is one number for each
expert, once the counts are known. One all-reduce sums them after all forward passes that count, before a backward pass.

Contract: the counts are taken over the global batch, so that biases and balance losses are the same for every plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslc.compiler.ir.steps import ModuleStep
from dslc.runtime.model.experts.expert_modules import Router
from dslc.runtime.process.records import EXPERT_LOAD

EACH = 256  # experts of all layers, up to which a metric names each


class ExpertBalance:
    """The routers of a rank's part of the model `root`. `group` are the ranks that hold other tokens of the same
    layers. `device` has the model.
    """

    def __init__(
        self, model: nn.Module, root: ModuleStep | None, group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self.layers = list(_routers_in(root, "")) if root is not None else []
        self.routers = {name: module for name, module in model.named_modules() if isinstance(module, Router)}
        self._moving = [router for router in self.routers.values() if router.rate is not None]
        self._with_loss = [router for router in self.routers.values() if router.probability_sum is not None]
        self.has_loss = root is not None and _has_router(root, "factor")  # of a pipeline, perhaps on other stages alone
        self._group, self._device = group, device
        self._has_capacity = root is not None and _has_router(root, "capacity")
        for router in self.routers.values():
            router.group = group

    def begin(self) -> None:
        """Begins to count for a step."""
        for router in self.routers.values():
            router.load.zero_()
            for counter in (router.probability_sum, router.dropped_rows):
                if counter is not None:
                    counter.zero_()

    def begin_ahead(self) -> None:
        """Begins to count the tokens of forward passes without autograd, for the gradients of balance losses."""
        for router in self._with_loss:
            router.load_ahead = torch.zeros_like(router.load)

    @torch.no_grad()
    def set_gradients(self, scaled: Callable[[Tensor], Tensor]) -> None:
        """Gives routers the gradients of their balance losses, `scaled` as the task's loss is, when all tokens of the
        step are counted.
        """
        loads = [router.load if router.load_ahead is None else router.load_ahead for router in self._with_loss]
        for router, count in zip(self._with_loss, self._sum_over_ranks(loads), strict=True):
            tokens = (count.sum().double() / router.top_k).clamp(min=1)
            assert router.factor is not None
            router.load_ahead = None
            router.balance_gradient = router.factor * count.shape[0] * count.double() / tokens.square()
            router.scaled_gradient = scaled(router.balance_gradient)

    def balance_loss(self) -> Tensor:
        """Returns the sum of the balance losses of this rank's layers over its tokens. Its sum over the ranks is that
        of the global batch.
        """
        losses = [torch.zeros((), device=self._device)]
        for router in self._with_loss:
            assert router.balance_gradient is not None and router.probability_sum is not None
            losses.append((router.balance_gradient * router.probability_sum).sum())
        return torch.stack(losses).sum()

    def _sum_over_ranks(self, loads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the tokens of each expert in the global batch, by router, given this rank's."""
        if not loads:  # on a stage without experts
            return ()
        counts = torch.cat([*loads])
        if self._group is not None:
            dist.all_reduce(counts, group=self._group)
        by_router: tuple[Tensor, ...] = counts.split([load.shape[0] for load in loads])
        return by_router

    @torch.no_grad()
    def update(self) -> None:
        """Moves the biases by the tokens of the step."""
        if not self._moving:
            return
        counts = self._sum_over_ranks([router.load for router in self._moving])
        for router, count in zip(self._moving, counts, strict=True):
            assert router.rate is not None and router.e_score_correction_bias is not None
            # In whole numbers, so that a count at the mean is exactly there.
            direction = (count.sum() - count * count.shape[0]).sign()
            router.e_score_correction_bias.add_(direction, alpha=router.rate)

    def counts(self) -> Tensor:
        """Returns the tokens that this rank has sent to each expert of all layers in the step, in order, and how many
        of them were dropped.
        """
        device = next(iter(self.routers.values())).load.device if self.routers else None
        counts = [
            self.routers[name].load.double() if name in self.routers else torch.zeros(experts, device=device).double()
            for name, experts in self.layers
        ]
        dropped = [router.dropped_rows.double() for router in self.routers.values() if router.dropped_rows is not None]
        return torch.cat([*counts, torch.cat(dropped).sum(0, keepdim=True) if dropped else counts[0].new_zeros(1)])

    def loads(self, counts: Sequence[float]) -> dict[str, float]:
        """Returns the loads of the experts by name, given the counts of all ranks: 1 is an even share."""
        loads: dict[str, float] = {}
        *rest, dropped = counts
        share = {"dropped_share": dropped / max(sum(rest), 1.0)} if self._has_capacity else {}
        for name, experts in self.layers:
            own, rest = rest[:experts], rest[experts:]
            even = max(sum(own), 1.0) / experts
            layer = name.removesuffix(".gate")
            loads |= {f"{EXPERT_LOAD}{layer}.{number}": count / even for number, count in enumerate(own)}
        extremes = {"load_max": max(loads.values()), "load_min": min(loads.values())}
        return share | extremes | (loads if len(loads) <= EACH else {})


def _routers_in(step: ModuleStep, path: str) -> Iterator[tuple[str, int]]:
    """Yields the routers below a module with their numbers of experts."""
    for child in step.children:
        name = f"{path}.{child.name}" if path else child.name
        if child.kind == ".Router":
            yield name, child.arguments["experts"]
        yield from _routers_in(child, name)


def _has_router(step: ModuleStep, argument: str) -> bool:
    """True if a router below a module has an argument."""
    return any(
        (child.kind == ".Router" and child.arguments.get(argument) is not None) or _has_router(child, argument)
        for child in step.children
    )
