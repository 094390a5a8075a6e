"""Saves and loads an exchange's tensors, and the weights of ranks that differ.

own.<rank>.<name>           a rank's own weights, beside their mean
exchange.<rank>.<name>      a tensor of the exchange on one rank
exchange.<name>             a tensor that is the same on all ranks
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
    """The exchange's part of a checkpoint."""

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
        float_tensors = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        return in_place_of(float_tensors, self._exchange.where)

    def rank_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns what this rank writes beside the mean."""
        own_tensors = (
            {f"own.{self._rank}.{name}": tensor for name, tensor in tensors.items()} if self._exchange.differ else {}
        )
        own_tensors |= {f"exchange.{self._rank}.{name}": tensor for name, tensor in self._exchange.own.items()}
        if self._rank == 0:
            own_tensors |= {f"exchange.{name}": tensor for name, tensor in self._exchange.shared.items()}
        return own_tensors

    def key(self, name: str, stored_keys: Collection[str], same_ranks: bool) -> str:
        """Returns the name under which this rank's tensor is stored. `same_ranks`: as many ranks wrote as read."""
        own_key = f"own.{self._rank}.{name}"
        return own_key if same_ranks and self._exchange.differ and own_key in stored_keys else name

    def tensors_to_load(
        self, stored_tensors: Mapping[str, TensorStorageMetadata], same_ranks: bool
    ) -> tuple[dict[str, Tensor], list[str]]:
        """Returns what the exchange reads, by its names in a checkpoint, and the names of what begins anew."""
        tensors, anew = dict[str, Tensor](), list[str]()
        entries = {
            f"exchange.{self._rank}.{name}": (name, tensor, same_ranks) for name, tensor in self._exchange.own.items()
        }
        entries |= {f"exchange.{name}": (name, tensor, True) for name, tensor in self._exchange.shared.items()}
        for key, (name, tensor, is_loadable) in entries.items():
            if is_loadable and key in stored_tensors and tuple(stored_tensors[key].size) == tuple(tensor.shape):
                tensors[key] = tensor
            else:
                anew.append(name)
        self._exchange.ready = not anew
        return tensors, anew

    def after_load(self) -> None:
        self._exchange.after_load()
