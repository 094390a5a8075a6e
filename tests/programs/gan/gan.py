"""A DCGAN: two networks that are trained against each other, each with its own update."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

CODE = 8
Batch = tuple[Tensor, Tensor]


class Pictures:
    """Smooth stripes of 16 x 16, each with the noise that the generator begins with."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Batch:
        random = torch.Generator().manual_seed(index)
        pace, shift = torch.rand(2, generator=random)
        stripe = torch.sin(torch.arange(16) * (0.2 + pace) + 6 * shift)
        return stripe.expand(1, 16, 16).clone(), torch.randn(CODE, 1, 1, generator=random)


class Gan(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(CODE, 2 * width, 4), nn.GroupNorm(2, 2 * width), nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.GroupNorm(2, width), nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(width, 2 * width, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 1, 4), nn.Flatten(0),
        )  # fmt: skip


def judged(scores: Tensor, real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)), reduction="none")


def step(training: Any, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    pictures, noise = batch
    generator, discriminator = training.model.generator, training.model.discriminator
    fake = generator(noise)
    told = judged(discriminator(pictures), True) + judged(discriminator(fake.detach()), False)
    training.update(told, "discriminator")
    fooled = judged(discriminator(fake), True)
    training.update(fooled, "generator")
    return told, {"fooled": fooled}


def plain(steps: int) -> list[float]:
    torch.manual_seed(0)
    model = Gan()
    losses: list[float] = []
    of_generator = torch.optim.Adam(model.generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    of_discriminator = torch.optim.Adam(model.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    while len(losses) < steps:
        for pictures, noise in DataLoader(Pictures(), batch_size=8):  # type: ignore[arg-type]
            fake = model.generator(noise)
            real, made = model.discriminator(pictures), model.discriminator(fake.detach())
            loss = (judged(real, True) + judged(made, False)).mean()
            of_discriminator.zero_grad()
            loss.backward()
            of_discriminator.step()
            of_generator.zero_grad()
            judged(model.discriminator(fake), True).mean().backward()
            of_generator.step()
            losses.append(loss.item())
    return losses[:steps]
