"""PyTorch's example of a variational autoencoder: reconstruction and divergence, its noise a part of each sample."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

CODE = 4
Sample = tuple[Tensor, Tensor]


class Images(Dataset[Sample]):
    """Bright bars of 8 x 8, each with the noise that its code is drawn with."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Sample:
        random = torch.Generator().manual_seed(index)
        image = torch.zeros(8, 8)
        image[index % 8] = 0.5 + 0.5 * torch.rand(8, generator=random)
        return image, torch.randn(CODE, generator=random)


class VAE(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, width), nn.Linear(width, CODE), nn.Linear(width, CODE)
        self.fc3, self.fc4 = nn.Linear(CODE, width), nn.Linear(width, 64)

    def reconstruct(self, image: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.fc1(image.flatten(1)))
        mean, log_variance = self.fc21(hidden), self.fc22(hidden)
        code = mean + noise * torch.exp(0.5 * log_variance)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(code)))), mean, log_variance

    def forward(self, image: Tensor, noise: Tensor) -> Tensor:
        made, mean, log_variance = self.reconstruct(image, noise)
        entropy = F.binary_cross_entropy(made, image.flatten(1), reduction="none").sum(1)
        return entropy - 0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(1)


def plain(steps: int) -> list[float]:
    torch.manual_seed(0)
    model, losses = VAE(), list[float]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    while len(losses) < steps:
        for image, noise in DataLoader(Images(), batch_size=8):
            loss = model(image, noise).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses[:steps]
