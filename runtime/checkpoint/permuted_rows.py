"""Tensors whose rows a rank holds in another order than the whole tensor has, for torch's distributed checkpoint.

Model: a rank's rows are runs of rows of the whole tensor (model/row_order.py). Each run is a chunk of its own in the
checkpoint, at its place in the whole tensor, so that any other plan reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dslc.compiler.trace.private_torch import is_distributed, local_part
from dslc.runtime.model.initial_weights import part_of
from dslc.runtime.model.row_order import Run, is_permuted, runs_of_part

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


def with_chunks(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a checkpoint, by its keys, with permuted ones as their runs of rows."""
    return {key: _with_chunks(_parameter_of(key), tensor) for key, tensor in tensors.items()}


def _parameter_of(key: str) -> str:
    kind, _, name = key.partition(".")
    return name.rpartition(".")[0] if kind == "optimizer" else name


def _with_chunks(name: str, tensor: Tensor) -> Tensor:
    if not is_permuted(name) or not is_distributed(tensor):
        return tensor
    chunked = local_part(tensor).detach().as_subclass(PermutedRows)
    chunked.whole, chunked.runs = tensor.shape, list(runs_of_part(name, part_of(tensor)))
    return chunked


class PermutedRows(Tensor):
    """This rank's rows. Its methods are those that torch's checkpoints ask of a tensor in chunks."""

    whole: torch.Size
    runs: list[Run]

    def size(self, dim: int | None = None) -> Any:
        return self.whole if dim is None else self.whole[dim]

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        plain = self.as_subclass(Tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(plain), size=self.whole
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(
                offsets=torch.Size(interval.start for interval in part),
                sizes=torch.Size(interval.stop - interval.start for interval in part),
            )
            for _, part in self.runs
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        own_run = next(
            own for own, run in self.runs if tuple(interval.start for interval in run) == tuple(index.offset or ())
        )
        return self.as_subclass(Tensor)[own_run]
