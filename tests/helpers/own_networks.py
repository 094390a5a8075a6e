"""Networks, losses, optimizers and data of a user's own, for tests of pipelines and for drawn jobs:
`python("own_networks:…")`.

They hold everything that is hard to cut into stages or shares: sequences within a sequence, parameters, buffers and
tied weights that belong to no layer, skip connections that cross every cut, views, masks, and numbers that grow with
the batch.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset


def network(inputs: int = 6, width: int = 8, outputs: int = 3, depth: int = 1, dropout: float = 0.0) -> nn.Module:
    """Sequences within a sequence."""
    inner = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh()) for _ in range(depth)]
    first = (nn.Flatten(), nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
    return nn.Sequential(*first, *inner, *[nn.Dropout(dropout)] * (dropout > 0), nn.Linear(width, outputs))


class Still(nn.Sequential):
    """Its batch norm stays in evaluation mode, whatever mode the others are put into."""

    def train(self, mode: bool = True) -> Still:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        return self


class StillForward(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        return super().forward(x)


def noisy(mode: str = "train", p: float = 0.5) -> nn.Module:
    """Dropout and batch norm: in training mode, as `from_pretrained` gives it, or with its norm kept still."""
    kind = {"override": Still, "forward": StillForward}.get(mode, nn.Sequential)
    layers = nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(p), nn.Linear(16, 10)
    made = kind(*layers)
    return made.eval() if mode == "eval" else made


class Residual(nn.Module):
    """A module that is not a sequence, with a parameter of its own, a buffer and perhaps a tied weight."""

    seen: Tensor

    def __init__(self, inputs: int = 6, width: int = 8, outputs: int = 3, tie: bool = True) -> None:
        super().__init__()
        self.into = nn.Linear(inputs, width)
        linears = [nn.Linear(width, width) for _ in range(2)]
        if tie:
            linears[1].weight = linears[0].weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), linear) for linear in linears)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(width))
        self.out = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x.flatten(1))
        for block in self.blocks:
            x = x + self.scale * torch.tanh(block(x)) + self.seen
        return self.out(x)


class Skips(nn.Module):
    """Skip connections that cross every cut; a parameter of its own before its first layer; views and masks."""

    def __init__(self, inputs: int = 6, width: int = 8, outputs: int = 3, norm: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, inputs))
        self.enter = nn.Linear(inputs, width)
        norms = [nn.BatchNorm1d(width) if norm else nn.Tanh() for _ in range(4)]
        self.down = nn.ModuleList([nn.Sequential(nn.Linear(width, width), norms[n]) for n in range(2)])
        self.up = nn.ModuleList([nn.Sequential(nn.Linear(width, width), norms[n]) for n in (2, 3)])
        self.leave = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        samples = len(x)
        flat = x.reshape(samples, -1)
        with torch.no_grad():
            scale = flat.std(dim=1, keepdim=True) + 1
        first = self.enter(self.weight * flat / scale)
        second = self.down[0](first)
        x = self.down[1](second)
        x = self.up[0](x) + second
        x = self.up[1](x) * torch.sigmoid(first)
        if self.training:
            x = x * 1.0
        return self.leave(x.view(samples, 1, -1)[:, 0])


class Shifted(nn.Module):
    """Every stage needs its buffer, which is drawn after its parameter."""

    shift: Tensor

    def __init__(self, inputs: int = 64, width: int = 24, outputs: int = 10) -> None:
        super().__init__()
        ends = ((inputs, width), (width, width), (width, width), (width, outputs))
        self.layers = nn.ModuleList([nn.Linear(*each) for each in ends])
        self.gain = nn.Parameter(torch.empty(width))
        self.register_buffer("shift", torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.gain)
        nn.init.uniform_(self.shift)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x.flatten(1)) * self.gain + self.shift
        return self.layers[3](self.layers[2](self.layers[1](x).tanh()).tanh() + self.shift)


class Turned(nn.Module):
    """Rotates between its blocks, by a complex table that is a plain attribute, as reference code for Llama has it."""

    def __init__(self, inputs: int = 64, width: int = 24, outputs: int = 10) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(inputs, width), nn.Linear(width, outputs)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4))
        self.freqs_cis = torch.polar(torch.ones(width // 2), torch.linspace(0, 3, width // 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x.flatten(1))
        self.freqs_cis = self.freqs_cis.to(x.device)
        for layer in self.layers:
            pairs = torch.view_as_complex(layer(x).float().unflatten(1, (-1, 2)))
            x = torch.view_as_real(pairs * self.freqs_cis).flatten(1)
        return self.leave(x)


class SpareBlock(nn.Module):
    """With a parameter and a layer that no step uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.spare = nn.Parameter(torch.ones(3, 5))
        self.later = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Spares(nn.Module):
    """Parameters that no step uses: of the module itself, in its blocks, and in layers that are never called."""

    def __init__(self, inputs: int = 64, width: int = 24, outputs: int = 10) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.full((7, 3), 0.5))
        self.unused = nn.Sequential(nn.Linear(width, 5), nn.Sequential(nn.Linear(5, 2)))
        self.enter = nn.Linear(inputs, width)
        blocks = [SpareBlock(width) for _ in range(4)]
        blocks[3].later.weight = blocks[0].later.weight  # tied over stages
        self.blocks = nn.ModuleList(blocks)
        self.leave = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x.flatten(1)).tanh()
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor]:
        weights = (self.mix(x) @ x.transpose(1, 2)).masked_fill(mask, float("-inf")).softmax(-1)
        return x + self.down(self.up(self.norm(weights @ x)).relu()), mask


class RepeatedBlock(nn.Module):
    """Uses a linear map twice, with another between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.twice, self.between = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.twice(torch.tanh(self.between(torch.tanh(self.twice(x)))))


class RepeatedBlocks(nn.Module):
    """Blocks that are alike, each of which uses a parameter twice."""

    def __init__(self, blocks: int = 9) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Flatten(), nn.Linear(64, 12))
        self.blocks = nn.ModuleList(RepeatedBlock(12) for _ in range(blocks))
        self.leave = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Decoder(nn.Module):
    """Blocks that pass a mask on; positions are a parameter of its own, and the head may be its table of tokens."""

    later: Tensor
    scale: Tensor

    def __init__(
        self, vocab: int = 256, width: int = 8, blocks: int = 2, tie: bool = True, container: str = "list"
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, width)
        self.position = nn.Parameter(0.1 * torch.randn(16, width))
        self.register_buffer("later", torch.ones(16, 16, dtype=torch.bool).triu(1), persistent=False)
        self.register_buffer("scale", torch.full((width,), 0.5))
        made = [Block(width) for _ in range(blocks)]
        if container == "list":
            self.blocks: Any = nn.ModuleList(made)
        elif container == "dictionary":
            self.blocks = nn.ModuleDict({"abcdefgh"[n]: block for n, block in enumerate(made)})
        elif container == "nested":
            self.blocks = nn.ModuleList(
                nn.ModuleDict({"even": a, "odd": b}) for a, b in zip(made[::2], made[1::2], strict=True)
            )
        else:
            for n, block in enumerate(made):
                setattr(self, f"block{n}", block)
        self.head = nn.Linear(width, vocab, bias=False)
        if tie:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.size(1)
        assert length <= 16
        x = self.table(tokens) + self.position[:length]
        mask = self.later[:length, :length].expand(tokens.size(0), length, length)
        for block in (module for module in self.modules() if isinstance(module, Block)):
            x, mask = block(x, mask=mask)
        return self.head(x * self.scale)


def classified(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.float(), target, reduction="none")


def measured(output: Tensor, target: Tensor, power: int = 2) -> Tensor:
    return (output.float() - target).abs().pow(power).flatten(1).mean(1)


def data() -> tuple[TensorDataset, TensorDataset]:
    """Six numbers and a class; a pair is (train, validation)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(61, 6, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    return TensorDataset(x[:50], y[:50]), TensorDataset(x[50:], y[50:])


class Augmented(Dataset[tuple[Tensor, int]]):
    """Samples with noise from each generator, more of it for some samples than for others."""

    def __init__(self, size: int, shift: int = 0) -> None:
        self.clean = torch.linspace(-1, 1, size)[:, None].repeat(1, 64).mul(torch.arange(64)).cos()
        self.size, self.shift = size, shift

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = torch.zeros(64)
        for _ in range(1 + index % 3):
            noise = noise + torch.rand(64) + float(np.random.normal()) + random.gauss(0.0, 1.0)
        return self.clean[index] + noise, (index + self.shift) % 10


def augmented() -> tuple[Augmented, Augmented]:
    return Augmented(48), Augmented(20, 3)


def padded(ignore: int = -100, kept: float = 0.4) -> tuple[TensorDataset, TensorDataset]:
    """Sequences of 16 tokens of 32; in some most targets count, in others few."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(32, (40, 17), generator=random)
    counts = torch.rand(40, 16, generator=random) < 2 * kept * torch.rand(40, 1, generator=random)
    both = tokens[:, :-1], tokens[:, 1:].where(counts, ignore)
    return TensorDataset(*(each[:32] for each in both)), TensorDataset(*(each[32:] for each in both))


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """One loss for each token, also for those that do not count, whose target it takes for the first class."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.clamp(min=0).flatten(), reduction="none")


class Fetched(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are fetched one by one."""

    def __init__(self, whole: TensorDataset) -> None:
        self.whole = whole

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        input, target = self.whole[index]
        return input, target


def labelled(wrong: int, whole: bool = False) -> Dataset[tuple[Tensor, ...]]:
    """Samples of ten classes, and one with an eleventh."""
    targets = torch.arange(40) % 10
    targets[wrong] = 10
    made = TensorDataset(torch.linspace(-1, 1, 40)[:, None].repeat(1, 64), targets)
    return made if whole else Fetched(made)


def class_loss(output: Tensor, target: Tensor) -> Tensor:
    return -output.log_softmax(-1).gather(-1, target[:, None])[:, 0]


class Heavy(torch.optim.Optimizer):
    """Momentum and weight decay, with a count of Python's and one in the group."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"count": 0, "kept": torch.zeros_like(p)}
                state["count"] += 1
                state["kept"].mul_(0.9).add_(p.grad + group["weight_decay"] * p)
                p.add_(state["kept"], alpha=-group["lr"] / (1 + 0.01 * (state["count"] + group["steps"])))


class Normed(torch.optim.SGD):
    """Divides by the norm of a parameter's whole gradient, which no rows of it know."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad / (1 + p.grad.norm()), alpha=-group["lr"])


class Tied(nn.Module):
    """A language model, some of whose parameters have several names. `first` is the module that is made first."""

    embed: nn.Module
    head: nn.Module

    def __init__(self, first: str = "embed", vocab: int = 11, width: int = 8) -> None:
        super().__init__()
        made = {"embed": nn.Embedding(vocab, width), "head": nn.Linear(width, vocab)}
        for name in sorted(made, key=lambda name: name != first):
            self.add_module(name, made[name])
        made["head"].weight = made["embed"].weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4))
        for n in (1, 3):
            self.blocks[n][0].weight = self.blocks[0][0].weight  # type: ignore[index]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def decays_head(named_parameters: Any, lr: float) -> torch.optim.Optimizer:
    """AdamW whose weight decay is for parameters with `head` in their first name."""
    named = list(named_parameters)
    groups = [{"params": [p for name, p in named if ("head" in name) == head]} for head in (False, True)]
    decays = [{**group, "weight_decay": decay} for group, decay in zip(groups, (0.0, 0.9), strict=True)]
    return torch.optim.AdamW([group for group in decays if group["params"]], lr=lr)
