"""A variational autoencoder: its output is a dict, its loss has two parts, and it draws noise of the sample."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

PIXELS, CODE = 64, 8


class Pictures:
    """A bright square somewhere in 8 x 8 pixels, with the noise that its code is disturbed by."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        random = torch.Generator().manual_seed(index)
        row, column = torch.randint(0, 5, (2,), generator=random).tolist()
        picture = torch.zeros(8, 8)
        picture[row : row + 3, column : column + 3] = 1
        return (picture.flatten(), torch.randn(CODE, generator=random)), picture.flatten()


class Autoencoder(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(PIXELS, width), nn.ReLU(), nn.Linear(width, 2 * CODE))
        self.decoder = nn.Sequential(nn.Linear(CODE, width), nn.ReLU(), nn.Linear(width, PIXELS))

    def forward(self, picture: Tensor, noise: Tensor) -> dict[str, Tensor]:
        mean, spread = self.encoder(picture).chunk(2, dim=-1)
        code = mean + noise * (0.5 * spread).exp()
        return {"picture": self.decoder(code), "mean": mean, "spread": spread}


def elbo(output: dict[str, Tensor], picture: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns one loss for each sample, and its two parts, which are logged."""
    rebuilt = F.binary_cross_entropy_with_logits(output["picture"], picture, reduction="none").sum(1)
    divergence = 0.5 * (output["mean"].square() + output["spread"].exp() - 1 - output["spread"]).sum(1)
    return rebuilt + divergence, {"rebuilt": rebuilt, "divergence": divergence}


def plain(steps: int) -> list[float]:
    torch.manual_seed(0)
    model = Autoencoder()
    losses: list[float] = []
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    while len(losses) < steps:
        for (picture, noise), target in DataLoader(Pictures(), batch_size=8):  # type: ignore[arg-type]
            loss = elbo(model(picture, noise), target)[0].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses[:steps]
