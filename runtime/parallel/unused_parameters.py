"""Parameters that only some steps use, where a forward pass or a loss looks at numbers.

Model: `fully_shard` sums the gradients of all parameters of a unit at once, and DistributedDataParallel the gradients
of a bucket, on all ranks alike. So each parameter needs a gradient. A parameter that a rank's batch has not used, by
the graph of its loss, is added to the loss, times 0. A parameter that no rank has used in a step loses its gradient
before the update, as in one process: neither momentum nor weight decay moves it.

Limits: the whole model is one unit of `fully_shard`, gathered during the passes (compiler/placement/sharding.py). The
host waits for the device once a step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node

from dslc.compiler.trace.structures import tensors


class Varying:
    """Agrees on the part of a model that the ranks of a group use in a step. All of them call both methods."""

    def __init__(self, model: nn.Module, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._model, self._group = model, group
        self._used = torch.zeros(len(self._parameters()), dtype=torch.int32, device=device)

    def touched(self, loss: Tensor, output: object) -> Tensor:
        """Returns a loss that gives every parameter a gradient, from the output on, where `fully_shard` waits."""
        found = set(leaves(loss))
        if not loss.requires_grad:
            for tensor in tensors(output):
                loss = loss + 0 * tensor.reshape(-1)[:1].sum() if tensor.requires_grad else loss
        for place, parameter in enumerate(self._parameters()):
            if id(parameter) in found:
                self._used[place] = 1
            else:
                loss = loss + 0 * parameter.reshape(-1)[:1].sum()
        return loss

    def drop(self) -> None:
        """Drops, after the passes of a step, the gradients of parameters that no rank has used."""
        if self._group is not None:
            dist.all_reduce(self._used, dist.ReduceOp.MAX, group=self._group)
        for parameter, used in zip(self._parameters(), self._used.tolist(), strict=True):
            if not used:
                parameter.grad = None
        self._used.zero_()

    def _parameters(self) -> list[nn.Parameter]:
        """Returns the parameters as they are now: whole while passes run, and this rank's rows afterwards."""
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]


def leaves(*outputs: Tensor) -> Iterator[int]:
    """Yields the identities of the parameters that a loss, or all outputs, depend on."""
    for node in graph_nodes(*outputs):
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield id(variable)


def graph_nodes(*outputs: Tensor) -> Iterator[Node]:
    """Yields each node of the graph from which some tensors have their gradients."""
    seen: set[Node] = set()
    waiting: list[Node | None] = [output.grad_fn for output in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(next_node for next_node, _ in node.next_functions)
