"""Losses of a user's own that draw random numbers: of samples, of a whole batch, and such as no layer can give."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def noisy(scores: Tensor, target: Tensor) -> Tensor:
    """Has noise and dropout of each sample, and one number for all. Two rows of each sample are joined in one draw."""
    pairs = F.dropout(torch.cat([scores, -scores]), 0.2)  # of (2 * samples, classes)
    scores = F.dropout(scores, 0.3) + 0.3 * torch.randn_like(scores) + 0.1 * pairs[len(scores) :]
    return F.cross_entropy(scores, target, reduction="none") * (1 + torch.rand(()))


def noisy_mean(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Counts by itself."""
    kept = (torch.rand(len(target)) < 0.7).float()
    return (F.cross_entropy(scores, target, reduction="none") * kept).sum(), kept.sum()


def against_others(scores: Tensor, target: Tensor) -> Tensor:
    """Compares samples."""
    noise = F.normalize(scores + 0.1 * torch.randn_like(scores), dim=1)
    return F.cross_entropy(noise @ noise.T / 0.2, torch.arange(len(noise)), reduction="none")


def noisy_tokens(scores: Tensor, target: Tensor) -> Tensor:
    """Has noise of each token, of each sample and for all, and dropout of rows that are tokens."""
    dropped = F.dropout(scores.flatten(0, 1), 0.2).view_as(scores)
    noise = torch.randn_like(scores) * torch.rand(len(scores))[:, None, None] * torch.rand(())
    return F.cross_entropy((dropped + noise).transpose(1, 2), target, reduction="none")


def masked_tokens(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Has a mask of tokens, and counts by itself."""
    kept = (torch.rand(target.shape) < 0.7).float()
    return (F.cross_entropy(scores.transpose(1, 2), target, reduction="none") * kept).sum(), kept.sum()


def noisy_numbers(output: Tensor, target: Tensor) -> Tensor:
    """Has noise of each number, and a weight of each sample."""
    away = output + 0.3 * torch.randn_like(output) - target
    return away.square().flatten(1).mean(1) * (0.5 + torch.rand(len(target)))


def turned_tokens(scores: Tensor, target: Tensor) -> Tensor:
    """Gives the first token what is drawn last."""
    noise = torch.randn(scores.shape)  # turned_tokens
    return F.cross_entropy((scores + noise.flip(1)).transpose(1, 2), target, reduction="none")


def mixup(scores: Tensor, target: Tensor) -> Tensor:
    order = torch.randperm(len(target))  # mixup
    return F.cross_entropy(scores, target[order], reduction="none")


def backwards(scores: Tensor, target: Tensor) -> Tensor:
    """Gives the first sample what is drawn last."""
    noise = torch.randn(scores.shape)  # backwards
    return F.cross_entropy(scores + noise.flip(0), target, reduction="none")
