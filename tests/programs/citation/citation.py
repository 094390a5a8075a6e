"""Graph convolution as Kipf and Welling have it: one graph, a sparse adjacency of an index tensor, nodes as samples."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

NODES, FEATURES, CLASSES = 60, 10, 3


def edges() -> Tensor:
    """Returns (2, edges): papers mostly cite those of their own kind, and each stands for itself."""
    random = torch.Generator().manual_seed(0)
    source, target = torch.randint(NODES, (2, 4 * NODES), generator=random)
    target = torch.where(
        torch.rand(4 * NODES, generator=random) < 0.8, target - target % CLASSES + source % CLASSES, target
    )
    alone = torch.arange(NODES)
    both = torch.cat([torch.stack([source, target]), torch.stack([target, source]), torch.stack([alone, alone])], 1)
    return both.clamp(max=NODES - 1).unique(dim=1)


class Papers(Dataset[tuple[Tensor, int]]):
    """The number of a node, and its class."""

    def __len__(self) -> int:
        return NODES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor(index), index % CLASSES


class GCN(nn.Module):
    features: Tensor
    index: Tensor
    values: Tensor

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(1)
        index = edges()
        degree = torch.bincount(index[0], minlength=NODES).float()
        self.register_buffer("features", torch.randn(NODES, FEATURES, generator=random))
        self.register_buffer("index", index)
        self.register_buffer("values", (degree[index[0]] * degree[index[1]]).rsqrt())
        self.first, self.second = nn.Linear(FEATURES, width, bias=False), nn.Linear(width, CLASSES, bias=False)

    def forward(self, nodes: Tensor) -> Tensor:
        adjacency = torch.sparse_coo_tensor(self.index, self.values, (NODES, NODES), check_invariants=False)
        hidden = torch.sparse.mm(adjacency, self.first(self.features)).relu()
        scores: Tensor = torch.sparse.mm(adjacency, self.second(hidden))[nodes]
        return scores


def plain(steps: int) -> list[float]:
    torch.manual_seed(0)
    model, losses = GCN(), list[float]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    while len(losses) < steps:
        for nodes, kinds in DataLoader(Papers(), batch_size=12):
            loss = F.cross_entropy(model(nodes), kinds)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses[:steps]
