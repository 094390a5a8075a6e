"""Sharded parts of a model whose steps are a user's own: each part is a root of `fully_shard`, as it is called alone.

Model: the parts are the model's children that have a `forward`; of containers without one, theirs. Parameters that lie
outside of all parts, belong to two of them, or have no dimension stay whole on each rank. A part's parameters are
gathered when it is called, and with `reshard` (ZeRO-3) freed after that and gathered again for the backward pass; they
stay until the update that the pass is for. A reduce-scatter sums the gradients of a part after its backward pass.

Contract: all ranks call the parts in one order, and all or none use what a part gives in an update. A parameter that
some ranks use gets a gradient on all; a parameter that no rank uses has none, as in one process.
`ShardedModules.backward` does a backward pass so.

Limits: a step uses the parameters of a part through the part's `forward` alone; the trial before a training finds one
that does not (E0624).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslc.compiler.trace.private_torch import own_parameters
from dslc.runtime.model.errors import ModelError
from dslc.runtime.parallel.unused_parameters import leaves

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def parts_of(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields the parts of a model that can be called by themselves and have parameters, with their names."""
    for name, child in model.named_children():
        here = f"{path}.{name}" if path else name
        if type(child).forward is nn.Module.forward or isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from parts_of(child, here)
        elif any(True for _ in child.parameters()):
            yield here, child


def whole_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Returns the parameters that are in no part, or in several, or have no dimension."""
    seen: dict[nn.Parameter, int] = {}
    for _, part in parts_of(model):
        for parameter in part.parameters():
            seen[parameter] = seen.get(parameter, 0) + 1
    return {p for p in model.parameters() if seen.get(p, 0) != 1 or p.dim() == 0}


@contextlib.contextmanager
def present_when_called(model: nn.Module) -> Iterator[None]:
    """Gives the parts of a model their parameters only while each is called, as if they were sharded."""
    whole, parts = whole_parameters(model), [part for _, part in parts_of(model)]
    spots = {
        part: [
            (owner, name, parameter, nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad))
            for owner in part.modules()
            for name, parameter in own_parameters(owner).items()
            if parameter is not None and parameter not in whole
        ]
        for part in parts
    }

    def put(part: nn.Module, there: bool) -> None:
        for owner, name, parameter, absent in spots[part]:
            own_parameters(owner)[name] = parameter if there else absent

    hooks = [part.register_forward_pre_hook(lambda part, _: put(part, True)) for part in parts]
    hooks += [part.register_forward_hook(lambda part, _, __: put(part, False)) for part in parts]
    for part in parts:
        put(part, False)
    try:
        yield
    finally:
        for part in parts:
            put(part, True)
        for hook in hooks:
            hook.remove()


class ShardedModules:
    """The sharded parts of a model. To be made when they are in place, before the first step."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device
        self._units: dict[str, FSDPModule] = dict(parts_of(model))  # type: ignore[arg-type]
        self._names: list[str] = []  # of the parameters of parts that train
        self._numbers: dict[int, int] = {}  # by the identity of a gathered parameter: its place in `_names`
        for name, unit in self._units.items():
            part: Any = unit
            sharded = {id(p): f"{name}.{own}" for own, p in part.named_parameters() if _is_sharded(p)}
            trained = [sharded[id(p)] for p in part.parameters() if p.requires_grad and id(p) in sharded]
            places = {own: len(self._names) + place for place, own in enumerate(trained)}
            self._names += trained
            part.register_forward_pre_hook(self._gathered(name, places))

    @property
    def names(self) -> list[str]:
        return self._names

    def _gathered(self, name: str, places: dict[str, int]) -> Callable[[nn.Module, object], None]:
        def hook(part: nn.Module, _: object) -> None:
            for own, parameter in part.named_parameters():
                if f"{name}.{own}" in places:
                    self._numbers[id(parameter)] = places[f"{name}.{own}"]

        return hook

    def backward(self, loss: Tensor) -> set[str]:
        """Does a backward pass; returns the parameters of parts that some rank has used. Raises ModelError if a part is
        not used alike.
        """
        found = {self._numbers[each] for each in leaves(loss) if each in self._numbers}
        owners = [next(n for n, unit in enumerate(self._units) if each.startswith(f"{unit}.")) for each in self._names]
        used = torch.zeros(len(self._names) + len(self._units), dtype=torch.int32, device=self._device)
        if found:
            used[sorted(found | {len(self._names) + owners[place] for place in found})] = 1
        if self._group is not None:
            dist.all_reduce(used, group=self._group)
        counts, ranks = used.tolist(), dist.get_world_size(self._group) if self._group is not None else 1
        for number, (name, unit) in enumerate(self._units.items()):
            called = counts[len(self._names) + number]
            if called not in (0, ranks):
                raise ModelError(
                    f"`{name}` is used in this update by {called} of {ranks} ranks: where it is sharded, all of them "
                    "have to call and use it, or none"
                )
            if any(count not in (0, ranks) for count, owner in zip(counts, owners, strict=False) if owner == number):
                unit.unshard()
                for parameter in unit.parameters():  # type: ignore[attr-defined]
                    if parameter.requires_grad and id(parameter) in self._numbers:
                        loss = loss + 0 * parameter.reshape(-1)[:1].sum()
        loss.backward()
        return {name for name, count in zip(self._names, counts, strict=False) if count}

    def let_go(self, names: set[str] | None = None) -> None:
        """Frees gathered parameters, of the parts that have parameters of these names or of all."""
        for name, unit in self._units.items():
            if names is None or any(each.startswith(f"{name}.") for each in names):
                unit.reshard()


def _is_sharded(parameter: Tensor) -> bool:
    return hasattr(parameter, "to_local")
