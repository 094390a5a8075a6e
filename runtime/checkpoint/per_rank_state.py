"""The state of ranks whose weights differ, in checkpoints.

    own.<rank>.<name>        what this rank has under that name, as it is
    exchange.<rank>.<name>   what an exchange keeps on a rank, such as error feedback
    exchange.<name>          what it keeps alike on all ranks, such as an outer momentum

Model: under a name of its own a checkpoint has the mean over the ranks, of weights, statistics and the optimizer's
state. So it can be evaluated, exported and resumed as any other; a training with as many ranks goes on with what each
rank had.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from dslc.runtime.exchange.base import Exchange, in_place_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata


class ExchangeState:
    def __init__(self, exchange: Exchange, rank: int) -> None:
        self._exchange, self._rank = exchange, rank

    @property
    def differ(self) -> bool:
        return self._exchange.differ

    def of_all(self, tensors: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[None]:
        """Puts the mean over the ranks in the place of those that differ, while the context lasts."""
        if not self._exchange.differ:
            return contextlib.nullcontext()
        self._exchange.settle()
        differing = {name: each for name, each in tensors.items() if each.is_floating_point()}
        return in_place_of(differing, self._exchange.where)

    def rank_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns what this rank writes beside the mean."""
        found = {f"own.{self._rank}.{name}": each for name, each in tensors.items()} if self._exchange.differ else {}
        found |= {f"exchange.{self._rank}.{name}": each for name, each in self._exchange.own.items()}
        if self._rank == 0:
            found |= {f"exchange.{name}": each for name, each in self._exchange.shared.items()}
        return found

    def key(self, name: str, there: Collection[str], same: bool) -> str:
        """Returns the name under which this rank's tensor is found, if the ranks are the `same`."""
        own = f"own.{self._rank}.{name}"
        return own if same and self._exchange.differ and own in there else name

    def tensors_to_load(
        self, there: Mapping[str, TensorStorageMetadata], same: bool
    ) -> tuple[dict[str, Tensor], list[str]]:
        """Returns what the exchange reads, by its names in a checkpoint, and the names of what begins anew."""
        wanted, anew = dict[str, Tensor](), list[str]()
        named = {f"exchange.{self._rank}.{name}": (name, each, same) for name, each in self._exchange.own.items()}
        named |= {f"exchange.{name}": (name, each, True) for name, each in self._exchange.shared.items()}
        for key, (name, each, taken) in named.items():
            if taken and key in there and tuple(there[key].size) == tuple(each.shape):
                wanted[key] = each
            else:
                anew.append(name)
        self._exchange.ready = not anew
        return wanted, anew

    def after_load(self) -> None:
        self._exchange.after_load()
