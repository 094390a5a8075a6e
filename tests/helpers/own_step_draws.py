"""Steps of a user's own that draw: noise and times of a diffusion, and a duel of which one pass has both halves."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, TIMES = 8, 50


class Clouds:
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.linspace(-1, 1, WIDTH) * (index % 5 - 2), torch.zeros(1)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.times, self.enter, self.leave = nn.Embedding(TIMES, 16), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.middle, self.drop = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Dropout(0.2)), nn.Dropout(0.1)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        x = F.silu(self.enter(x) + self.times(times))
        return self.leave(self.drop(x + self.middle(x)))


def diffusion(training: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    clean, _ = batch
    times = torch.randint(0, TIMES, (len(clean),))
    kept = 1 - times[:, None] / TIMES
    clean = clean + torch.rand(()) * torch.rand_like(clean)  # the first number is all samples'
    noise = torch.randn(clean.shape)
    found = training.model(kept.sqrt() * clean + (1 - kept).sqrt() * noise, times)
    losses = (found - noise).square().mean(1)
    training.update(losses)
    return losses


class Duel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = (
            nn.Linear(4, WIDTH),
            nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.3), nn.Linear(16, 1)),
        )

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return self.judge(x)[:, 0]


def duel(training: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    real, _ = batch
    made = training.model.maker(torch.randn(len(real), 4))
    real_scores, made_scores = training.model.judge(torch.cat([real, made.detach()])).chunk(2)
    losses = (F.softplus(-real_scores) + F.softplus(made_scores))[:, 0]
    training.update(losses, "judge")
    made = training.model.maker(torch.randn(len(real), 4))
    training.update(F.softplus(-training.model.judge(made))[:, 0], "maker")
    return losses


def mixup(training: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    clean, _ = batch
    mixed = 0.5 * clean + 0.5 * clean[torch.randperm(len(clean))]
    losses = training.model(mixed, torch.zeros(len(clean), dtype=torch.long)).square().mean(1)
    training.update(losses)
    return losses


def halves(training: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    clean, _ = batch
    noise = torch.randn(len(clean) // 2, WIDTH)
    losses = training.model(clean + torch.cat([noise, -noise]), torch.zeros(len(clean), dtype=torch.long))
    training.update(losses.square().mean(1))
    return losses.square().mean(1)


def by_numpy(training: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    import numpy

    clean, _ = batch
    share = numpy.random.beta(0.4, 0.4)
    losses = training.model(share * clean, torch.zeros(len(clean), dtype=torch.long)).square().mean(1)
    training.update(losses)
    return losses


def contrastive(training: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Compares samples, with noise of one row for each, and rows to drop of four for each."""
    clean, _ = batch
    views = F.normalize(clean + 0.1 * torch.randn(clean.shape), dim=1)
    kept = torch.rand(len(clean) * 4).unflatten(0, (len(clean), 4)).mean(1)
    found = training.model(views, torch.zeros(len(clean), dtype=torch.long))
    losses = F.cross_entropy(found @ found.T, torch.arange(len(found)), reduction="none") * kept
    training.update(losses)
    return losses


def backwards(training: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Gives the first sample what is drawn last."""
    clean, _ = batch
    noisy = clean + torch.randn(clean.shape).flip(0)
    losses = training.model(noisy, torch.zeros(len(clean), dtype=torch.long)).square().mean(1)
    training.update(losses)
    return losses


def later(training: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Draws more in every second step: of each sample, and before that in a shape with another number of rows."""
    clean, _ = batch
    times = torch.zeros(len(clean), dtype=torch.long)
    if training.step % 2:
        clean = clean + 0.1 * torch.randn(len(clean), 1)
    if training.step == 3:
        clean = clean + 0.1 * torch.randn(3, 1).sum()  # of no samples
    losses = training.model(clean + torch.randn(clean.shape), times).square().mean(1)
    training.update(losses)
    return losses


def untried(training: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Draws for each sample, for all, and numbers of another kernel that change nothing."""
    clean, _ = batch
    times = torch.randint(0, TIMES, (len(clean),))
    noisy = clean + torch.randn_like(clean) * torch.rand(())  # seen
    noisy = noisy + 0 * torch.poisson(torch.ones(WIDTH))  # another kernel
    losses = training.model(noisy, times).square().mean(1)
    training.update(losses)
    return losses
