"""REINFORCE with a baseline: a policy acts in a small world of its own, and learns from the returns of its episodes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

LENGTH, STATES, ACTIONS, GAMMA = 6, 4, 3, 0.9

Episode = tuple[Tensor, Tensor]


class Starts(Dataset[Episode]):
    """Where an episode begins, and the numbers in [0, 1) by which its actions are drawn."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Episode:
        random = torch.Generator().manual_seed(index)
        return torch.randn(STATES, generator=random), torch.rand(LENGTH, generator=random)


class ActorCritic(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(STATES, width), nn.Tanh())
        self.policy, self.value = nn.Linear(width, ACTIONS), nn.Linear(width, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(state)
        return self.policy(hidden).log_softmax(-1), self.value(hidden).squeeze(-1)


def moved(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the next state, and the reward: how near the state is to the origin."""
    push = F.one_hot(action, STATES).to(state.dtype)
    state = 0.9 * state.roll(1, -1) - 0.5 * push
    return state, 1 - state.square().mean(-1)


def played(model: Any, state: Tensor, draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Plays an episode from each state; returns its log probabilities, values and rewards, by (episode, time)."""
    chosen, values, rewards = list[Tensor](), list[Tensor](), list[Tensor]()
    for time in range(LENGTH):
        likely, value = model(state)
        action = (likely.exp().cumsum(-1) < draws[:, time, None]).sum(-1).clamp(max=ACTIONS - 1)
        chosen.append(likely.gather(-1, action[:, None]).squeeze(-1))
        values.append(value)
        state, reward = moved(state, action)
        rewards.append(reward)
    return torch.stack(chosen, 1), torch.stack(values, 1), torch.stack(rewards, 1)


def loss_of(model: Any, state: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the loss of each episode, and the sum of its rewards."""
    chosen, values, rewards = played(model, state, draws)
    returns = rewards.clone()
    for time in reversed(range(LENGTH - 1)):
        returns[:, time] += GAMMA * returns[:, time + 1]
    advantage = returns - values.detach()
    return (F.smooth_l1_loss(values, returns, reduction="none") - chosen * advantage).sum(1), rewards.sum(1)


def step(training: Any, batch: Episode) -> tuple[Tensor, dict[str, Tensor]]:
    losses, rewards = loss_of(training.model, *batch)
    training.update(losses)
    return losses, {"reward": rewards}


def plain(steps: int) -> list[float]:
    torch.manual_seed(0)
    model, losses = ActorCritic(), list[float]()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    while len(losses) < steps:
        for state, draws in DataLoader(Starts(), batch_size=8):
            loss = loss_of(model, state, draws)[0].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses[:steps]
