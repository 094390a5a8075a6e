"""Time series of unequal length: each step's value is forecast from those before it, padding counts for nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

Batch = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


class Series:
    """Waves of 5 to 20 steps."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Tensor:
        random = torch.Generator().manual_seed(index)
        length = int(torch.randint(6, 22, (1,), generator=random))
        pace, shift = torch.rand(2, generator=random)
        return torch.sin(torch.arange(length) * (0.2 + pace) + 6 * shift)[:, None]


def padded(samples: list[Tensor]) -> Batch:
    """Returns (values, lengths) and (the next values, where there are some)."""
    lengths = torch.tensor([len(series) - 1 for series in samples])
    values, following = (pad_sequence([s[cut] for s in samples], True) for cut in (slice(-1), slice(1, None)))
    return (values, lengths), (following, torch.arange(values.shape[1]) < lengths[:, None])


class Forecaster(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.memory = nn.GRU(1, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(values, lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.memory(packed)[0], batch_first=True)
        forecast: Tensor = self.head(states)
        return forecast


def squared(forecast: Tensor, target: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    following, there = target
    return (forecast - following).square()[there].sum(), there.sum()


def plain(steps: int) -> list[float]:
    torch.manual_seed(0)
    model = Forecaster()
    losses: list[float] = []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader: DataLoader[Batch] = DataLoader(Series(), batch_size=8, collate_fn=padded)  # type: ignore[arg-type]
    while len(losses) < steps:
        for (values, lengths), (following, there) in loader:
            loss = (model(values, lengths) - following)[there].square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses[:steps]
