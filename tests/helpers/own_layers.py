"""A network as users write it, of three layers."""

from __future__ import annotations

from torch import Tensor, nn


class Layers(nn.Module):
    """`tied`: the first two share their weight. `aside`: there is a fourth, which no step uses."""

    def __init__(self, tied: bool = False, aside: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        if tied:
            self.second.weight = self.first.weight
        if aside:
            self.aside = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.last(self.second(self.first(inputs).relu()).relu())
        return found
