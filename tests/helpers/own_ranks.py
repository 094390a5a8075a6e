"""Networks, data and hooks that are not the same on each rank or in each call, which no trial in one process finds."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Chooses(nn.Module):
    """Runs one of its blocks on some ranks (`one`), another one on each (`other`), all of them in another order
    (`order`), or on other numbers (`scaled`), from a call on. `spare`: it has a parameter that no pass uses. It repeats
    a block by chance (`draws`) or by its samples (`experts`). `marked`: ranks only differ if a file `mark` is beside
    this one.
    """

    def __init__(
        self,
        how: str = "one",
        since: int = 1,
        width: int = 8,
        inputs: int = 6,
        *,
        spare: bool = False,
        draws: bool = False,
        experts: bool = False,
        tokens: bool = False,
        marked: bool = False,
    ) -> None:
        super().__init__()
        self.draws, self.experts, self.marked = draws, experts, marked
        if spare:
            self.spare = nn.Parameter(torch.zeros(3))
        self.into: nn.Module = nn.Embedding(256, width) if tokens else nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2))
        self.out = nn.Linear(width, 256 if tokens else 4)
        self.how, self.since, self.calls = how, since, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        parts = _rank() > 0 and self.calls >= self.since and self.training
        parts = parts and (not self.marked or Path(__file__).with_name("mark").exists())
        x = torch.tanh(self.into(x))
        blocks = list(self.blocks)
        if self.how == "one" and parts:
            blocks = blocks[:1]
        if self.how == "other" and self.training:
            blocks = blocks[_rank() : _rank() + 1]
        if self.how == "scaled" and parts:
            x = 1.5 * x
        for block in reversed(blocks) if self.how == "order" and parts else blocks:
            x = x + block(x)
        if (self.draws and random.random() < 0.5) or (self.experts and x.mean().item() > 0):
            x = x + blocks[0](x)
        return self.out(x)


class Writes(nn.Module):
    """Its forward pass writes the mean of its own batch into a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and _rank() > 0:
            self.layer.weight.data[0] += 0.25
        return self.layer(x)


class Hooked(nn.Module):
    """Doubles the gradient of its layer by a hook, which a tensor takes only with gradients. Tracing also runs without
    gradients: its tensors get no hook.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        if self.training and type(x) is Tensor:
            x.register_hook(lambda gradient: 2 * gradient)
        return self.out(x)


class Named(nn.Module):
    """Has its layers in another order on each rank."""

    def __init__(self) -> None:
        super().__init__()
        names = ["left", "right"]
        self.layers = nn.ModuleDict({name: nn.Linear(6, 6) for name in (names[::-1] if _rank() else names)})
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.layers["left"](x)) + self.layers["right"](x))


def data(how: str, count: int = 48) -> Any:
    """Samples that each rank makes for itself: `unseeded` ones, all or the `last` 8 in another `order`, or of another
    `file`; `marked`: other targets if a file `mark` is beside this one.
    """
    random = np.random.default_rng(int(how == "unseeded") * 1000 + _rank() * (how in ("unseeded", "order", "file")))
    if how == "order":
        order = random.permutation(count)
        random = np.random.default_rng(0)
    inputs = torch.from_numpy(random.normal(size=(count, 6)).astype("float32"))
    targets = torch.arange(count) % 4
    if how == "last" and _rank():
        inputs[-9:-1] = inputs[-9:-1].flip(0)
    if how == "marked" and _rank() and Path(__file__).with_name("mark").exists():
        targets = targets.flip(0)
    return TensorDataset(inputs[order], targets[order]) if how == "order" else TensorDataset(inputs, targets)


class Noisy(Dataset[tuple[Tensor, int]]):
    """Each access draws from a generator that each process seeds by itself; `targets` too, or only inputs. Rank 0 keeps
    what it has drawn, if it is `cached`.
    """

    def __init__(self, targets: bool = False, cached: bool = False) -> None:
        self._random, self._targets = np.random.default_rng(os.getpid()), targets
        self._cache: dict[int, Any] | None = {} if cached and dist.is_initialized() and not _rank() else None

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = torch.from_numpy(self._random.normal(size=6).astype("float32"))
        if self._cache is not None:
            noise = self._cache.setdefault(index, noise)
        return noise + index, (index + self._targets * _rank()) % 4


class Broken(Dataset[tuple[Tensor, int]]):
    """A sample of it is None, is no pair, raises in a function of its own, or ends the process that reads it."""

    def __init__(self, how: str, at: int = 20) -> None:
        self._how, self._at = how, at

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        if index == self._at:
            return getattr(self, f"_{self._how}")(index)
        return torch.full((6,), float(index)), index % 4

    def _none(self, index: int) -> None:
        return None

    def _single(self, index: int) -> Tensor:
        return torch.zeros(6)

    def _raises(self, index: int) -> Any:
        files: dict[str, Tensor] = {}
        return files[f"image-{index}.png"]

    def _killed(self, index: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _exits(self, index: int) -> None:
        os._exit(3)


class Counts(nn.Module):
    """Its third forward pass gives a number that is not finite: because of an attribute, of a number in a list, or of a
    buffer.
    """

    count: Tensor

    def __init__(self, kept: str = "calls") -> None:
        super().__init__()
        self.layer, self.kept, self.calls, self.listed = nn.Linear(6, 4), kept, 0, [0]
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.kept == "calls":
            self.calls += 1
        elif self.training and self.kept == "listed.0":
            self.listed[0] += 1
        elif self.training:
            self.count += 1
        third = self.calls == 3 or self.listed[0] == 3 or bool(self.count == 3)
        return self.layer(x) / (0.0 if third else 1.0)


class Scales:
    """A hook that scales a weight at an event: on the rank that calls it, or on one rank alone."""

    def __init__(self, event: str = "after_step", step: int = 1, only: int = -1) -> None:
        self._event, self._step, self._only = event, step, only

    def after_step(self, context: Any) -> None:
        self._do(context, "after_step")

    def evaluated(self, context: Any) -> None:
        self._do(context, "evaluated")

    def after_backward(self, context: Any) -> None:
        self._do(context, "after_backward")

    def _do(self, context: Any, event: str) -> None:
        if event != self._event or context.step < self._step or self._only not in (-1, context.rank):
            return
        with torch.no_grad():
            weight = next(context.model.parameters())
            weight = weight.grad if event == "after_backward" else weight
            getattr(weight, "_local_tensor", weight).mul_(0.5)
