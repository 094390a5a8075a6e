"""Networks whose forward passes draw, mix, move or keep something, for `python("own_forward_passes:…")`."""

from __future__ import annotations

import itertools
import os
import random
import secrets
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

GENERATOR = np.random.default_rng(0)


class Chooser:
    """Holds a generator, as a schedule of drop rates does."""

    def __init__(self) -> None:
        self.generator = random.Random(0)


class Path(nn.Module):
    """Uses one of two equal blocks, which `how` chooses in training."""

    def __init__(self, how: str = "random") -> None:
        super().__init__()
        self.how, self.calls = how, 0
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.generator = np.random.default_rng(0)
        self.system = random.SystemRandom() if how == "system" else None
        self.chooser = Chooser()
        self.listed: list[Any] = [np.random.RandomState(0), 0]
        self.turns = itertools.cycle([0, 1])
        self.counted: Any
        if how == "counted later":
            self.register_buffer("counted", torch.zeros((), dtype=torch.int64))

    def choose(self) -> int:
        self.calls += 1
        match self.how:
            case "random":
                return random.randrange(2)
            case "numpy":
                return int(np.random.randint(2))
            case "generator":
                return int(self.generator.integers(2))
            case "variable":
                return int(GENERATOR.integers(2))
            case "secrets":
                return secrets.randbelow(2)
            case "urandom":
                return os.urandom(1)[0] % 2
            case "unseeded":
                return int(np.random.default_rng().integers(2))
            case "turns":
                return self.calls % 2
            case "later":
                return int(self.calls > 700)
            case "system":
                return self.system.randrange(2) if self.system is not None else 0
            case "object":
                return self.chooser.generator.randrange(2)
            case "listed":
                return int(self.listed[0].randint(2))
            case "number":
                self.listed[1] += 1
                return self.listed[1] % 2
            case "cycle":
                return next(self.turns)
            case "drawn later":
                return random.randrange(2) if self.calls > 5 else 0
            case "counted later":
                self.counted += 1
                return random.randrange(2) if self.counted > 5 else 0
        return 0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        number = self.choose() if self.training else 0
        return self.leave(x + torch.tanh(self.blocks[number](x)))


class LayerDrop(nn.Module):
    """Leaves out each block with probability 1/2 in training."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        for block in self.blocks:
            if not self.training or random.random() >= 0.5:
                x = x + torch.tanh(block(x))
        return self.leave(x)


class SkippedNorms(nn.Module):
    """Leaves out blocks with a batch norm with probability 1/2, by numbers that `how` draws; `outside`: by no more than
    a linear map.
    """

    def __init__(self, how: str = "random", outside: bool = False, first: int = 60, classes: int = 3) -> None:
        super().__init__()
        self.how, self.first, self.calls = how, first, 0
        self.enter, self.leave, self.norm = nn.Linear(6, 8), nn.Linear(8, classes), nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), *(() if outside else (nn.BatchNorm1d(8),))) for _ in range(3)
        )
        self.generator = random.Random(0)

    def skip(self, x: Tensor) -> bool:
        match self.how:
            case "random":
                return random.random() < 0.5
            case "torch":
                return torch.rand(()).item() < 0.5
            case "samples":
                return bool(x[:, 0].mean() > 0)
            case "generator":
                return self.generator.random() < 0.5
            case "variable":
                return bool(GENERATOR.random() < 0.5)
            case "late":
                return self.calls > self.first and random.random() < 0.5
            case "clock":
                return bool(time.perf_counter_ns() // 64 % 2)
        return False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        x = self.norm(torch.tanh(self.enter(x)))
        for block in self.blocks:
            if not self.training or not self.skip(x):
                x = x + torch.tanh(block(x))
        return self.leave(x)


class ScaledNorm(nn.BatchNorm1d):
    """Doubles the output of torch's batch norm, or (`direct`) of statistics that it takes of its batch itself."""

    def __init__(self, features: int, direct: bool = False) -> None:
        super().__init__(features)
        self.direct = direct

    def forward(self, input: Tensor) -> Tensor:
        if self.direct:
            return 2 * F.batch_norm(input, None, None, training=True)
        return 2 * super().forward(input)


class Block(nn.Module):
    """One of two linear maps, by a generator of its own or by Python's."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.generator = random.Random(0) if own else None

    def forward(self, x: Tensor) -> Tensor:
        number = (self.generator or random).randrange(2)
        return x + torch.tanh(self.parts[number](x))


def blocks(own: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), *(Block(own) for _ in range(3)), nn.Linear(8, 3))


class Mixing(nn.Module):
    """Lets the samples of a batch see each other, in the way that `how` names."""

    def __init__(self, how: str = "mean") -> None:
        super().__init__()
        self.how = how
        self.enter, self.leave = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 3)
        self.norm: nn.Module = nn.InstanceNorm1d(8)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        match self.how:
            case "mean":
                x = x - x.mean(0)
            case "training":
                x = x - x.mean(0) if self.training else x
            case "norm":
                x = F.batch_norm(x, None, None, training=True)
            case "softmax":
                x = x.softmax(0)
            case "attention":
                x = (x @ x.T).softmax(-1) @ x
            case "sort":
                x = x.sort(0).values
            case "sums":
                x = x.cumsum(0)
            case "gate":
                x = x + self.gate * x.mean(0)
            case "shuffle":
                x = 0.7 * x + 0.3 * x[torch.randperm(len(x))] if self.training else x
            case "size":
                x = x / len(x)
            case "dropout":
                x = F.dropout(x, 0.5, self.training)
                x = x - x.mean(0)
            case "joined":
                # The first dim has the three parts of a joined projection, and not the samples.
                x = torch.stack([x, x + 1, x + 2]).tanh().sum(0)
                x = x - x.mean(0)
            case "instance":
                x = self.norm(x[:, :, None].expand(-1, -1, 4).cumsum(-1))[..., 0]
        return self.leave(x)


class Moving(nn.Module):
    """Moves a buffer in training, in the way that `how` names, and depends on it."""

    def __init__(self, how: str = "most", norm: bool = False) -> None:
        super().__init__()
        self.how = how
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.moved: Tensor
        self.register_buffer("moved", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.enter(x))
        if self.training:
            moved: Any = self.moved
            with torch.no_grad():
                match self.how:
                    case "most":
                        self.moved = torch.maximum(moved, x.max(0).values)
                    case "mean":
                        moved.lerp_(x.mean(0), 0.1)
                    case "samples":
                        moved += len(x)
                    case "calls":
                        moved += 1
        return self.leave(x / (1 + 0.1 * self.moved))


class Writing(nn.Module):
    """Writes to a parameter in training, in the way that `how` names."""

    def __init__(self, how: str = "teacher") -> None:
        super().__init__()
        self.how = how
        self.enter, self.slow, self.leave = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)
        self.slow.requires_grad_(how == "replaced")

    @torch.no_grad()
    def write(self, x: Tensor) -> None:
        match self.how:
            case "teacher":
                for slow, fast in zip(self.slow.parameters(), self.enter.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
            case "clamped":
                self.enter.weight.clamp_(-0.2, 0.2)
            case "replaced":
                self.slow.weight.data = F.normalize(self.slow.weight.data, dim=1)
            case "samples":
                self.slow.bias.lerp_(self.enter(x).mean(0), 0.1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.write(x)
        return self.leave(torch.tanh(self.enter(x)) + self.slow(x))


class Carrying(nn.Module):
    """Carries the state of an LSTM from pass to pass; or only looks, or computes a table once."""

    def __init__(self, how: str = "state") -> None:
        super().__init__()
        self.how = how
        self.lstm, self.leave = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)
        self.state: Any = None
        self.seen: Any = None

    def forward(self, x: Tensor) -> Tensor:
        fits = self.how == "state" and self.state is not None and self.state[0].shape[1] == len(x)
        x, state = self.lstm(x[:, None], self.state if fits else None)
        self.state, self.seen = tuple(each.detach() for each in state), x
        return self.leave(x[:, 0])


class Resting(nn.Module):
    """Puts a batch norm and a dropout into evaluation mode when it is made; `kept` keeps them in it."""

    def __init__(self, kept: bool = False) -> None:
        super().__init__()
        self.kept = kept
        self.enter, self.norm, self.leave = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.norm.eval()

    def train(self, mode: bool = True) -> Resting:
        super().train(mode)
        if self.kept:
            self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.norm(self.enter(x)))


class Untracked(nn.Module):
    """Has a batch norm without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False)
        self.leave = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.norm(self.enter(x)))


class Noisy(nn.Module):
    """Adds noise inside of a module of its own, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.noise, self.leave = nn.Linear(6, 8), Noise(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.noise(self.enter(x)))


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) if self.training else x


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 3))


class Failing(nn.Module):
    """Cannot take negative numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.leave = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, Tensor) and type(x) is Tensor and x.tolist() and min(map(min, x.tolist())) < 0:
            raise ValueError("negative numbers")
        return self.leave(x)


class Classes(torch.utils.data.Dataset[Any]):
    """Samples for a network that returns its own loss."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        numbers = torch.Generator().manual_seed(index)
        return {"x": torch.randn(6, generator=numbers), "y": torch.tensor(index % 3)}


class Losing(nn.Module):
    """Returns its loss: a mean over samples, perhaps under dropout, or with a term that compares them."""

    def __init__(self, how: str = "balance") -> None:
        super().__init__()
        self.how, self.leave = how, nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        output = self.leave(F.dropout(x, 0.5) if self.how == "dropout" else x)
        loss = F.cross_entropy(output, y)
        if self.how in ("balance", "slight"):
            loss = loss + (1.0 if self.how == "balance" else 0.01) * output.softmax(1).mean(0).square().sum()
        elif self.how == "contrast":
            loss = F.cross_entropy(output @ output.T, torch.arange(len(x)))
        return {"loss": loss}


class Momentum(nn.Module):
    """Each forward pass moves a frozen copy of a layer, and notes its number; the output depends on both."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 3)
        self.copied = nn.Linear(6, 8).requires_grad_(False)
        self.passes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes.append(len(self.passes))
            with torch.no_grad():
                self.copied.weight.lerp_(self.enter.weight, 0.1)
        return self.leave(torch.tanh(self.enter(x) + self.copied(x))) / (1 + 0.1 * len(self.passes))


class Repeated(nn.Module):
    """Buffers of which several elements lie at one place in memory."""

    scale: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        made = torch.full((1,), 2.0).expand(6) if how == "expanded" else torch.arange(4.0).as_strided((3, 2), (1, 1))
        self.register_buffer("scale", made)

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.layer(x * self.scale.reshape(6))
        return scaled


class PoissonNoise(nn.Linear):
    """Draws by sample, and then by a kernel of torch's that the runtime does not replace."""

    def __init__(self) -> None:
        super().__init__(6, 3)

    def forward(self, input: Tensor) -> Tensor:
        made = super().forward(nn.functional.dropout(input, 0.1, self.training))
        return made + torch.poisson(torch.ones_like(made))


class PermutedSamples(nn.Linear):
    """Mixes each sample with another of the batch."""

    def __init__(self) -> None:
        super().__init__(6, 3)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input + 0.1 * input[torch.randperm(len(input))] if self.training else input)


class Dropping(nn.Module):
    """Drops numbers by a function; in evaluation too, if it is not told of the mode."""

    def __init__(self, told: bool = False) -> None:
        super().__init__()
        self.told = told
        self.enter, self.leave = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        x = F.dropout(x, 0.1, training=self.training) if self.told else F.dropout(x, 0.1)
        return self.leave(x)


class CountsInside(Path):
    """Counts its calls in containers: under a key with dots, as names of parameters have, or in one that is empty."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.named = {"blocks": 0, "blocks.0": 0}
        self.table: dict[str, int] = {}
        self.history: list[int] = []

    def choose(self) -> int:
        match self.how:
            case "dotted":
                self.named["blocks.0"] += 1
                return self.named["blocks.0"] % 2
            case "table":
                self.table["calls"] = self.table.get("calls", 0) + 1
                return self.table["calls"] % 2
        self.history.append(1)
        return len(self.history) % 2
