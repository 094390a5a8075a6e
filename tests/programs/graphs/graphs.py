"""Graph convolution over graphs of unequal size: the graphs of a batch are one graph of separate parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader


@dataclass
class Graphs:
    nodes: Tensor  # (nodes, 6)
    edges: Tensor  # (2, edges)
    graph: Tensor  # the graph of each node
    count: int


class Molecules:
    """Rings of 4 to 9 nodes; a graph's class is whether its number of nodes is even."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        random = torch.Generator().manual_seed(index)
        size = int(torch.randint(4, 10, (1,), generator=random))
        return torch.randn(size, 6, generator=random) + size % 2, size % 2


def joined(samples: list[tuple[Tensor, int]]) -> tuple[Graphs, Tensor]:
    edges, first = [], 0
    for nodes, _ in samples:
        ring = torch.arange(len(nodes))
        edges.append(torch.stack([ring, ring.roll(1)]) + first)
        first += len(nodes)
    sizes = torch.tensor([len(nodes) for nodes, _ in samples])
    graph = torch.arange(len(samples)).repeat_interleave(sizes)
    nodes = torch.cat([nodes for nodes, _ in samples])
    return Graphs(nodes, torch.cat(edges, 1), graph, len(samples)), torch.tensor([label for _, label in samples])


class Convolution(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, graphs: Graphs) -> Tensor:
        states = self._spread(graphs, self.first(graphs.nodes)).relu()
        states = self._spread(graphs, self.second(states)).relu()
        pooled = states.new_zeros(graphs.count, states.shape[1]).index_add(0, graphs.graph, states)
        scores: Tensor = self.head(pooled)
        return scores

    def _spread(self, graphs: Graphs, states: Tensor) -> Tensor:
        source, target = graphs.edges
        return states + torch.zeros_like(states).index_add(0, target, states[source])


def losses_of(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels, reduction="none")


def plain(steps: int) -> list[float]:
    torch.manual_seed(0)
    model = Convolution()
    losses: list[float] = []
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(Molecules(), batch_size=8, collate_fn=joined)  # type: ignore[arg-type, var-annotated]
    while len(losses) < steps:
        for graphs, labels in loader:
            loss = F.cross_entropy(model(graphs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses[:steps]
