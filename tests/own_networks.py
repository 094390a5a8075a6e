"""Networks, losses and data of a user's own, for tests of pipelines and for drawn jobs: `python("own_networks:…")`.

What is not simple to cut into stages or shares: sequences within a sequence, parameters, buffers and tied weights that
belong to no layer, skip connections that cross every cut, views, masks, and numbers that grow with the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def network(inputs: int = 6, width: int = 8, outputs: int = 3, depth: int = 1) -> nn.Module:
    """Sequences within a sequence."""
    inner = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh()) for _ in range(depth)]
    first = (nn.Flatten(), nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
    return nn.Sequential(*first, *inner, nn.Linear(width, outputs))


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
    """Dropout and batch norm: in training mode, or as it comes out of `from_pretrained`, or with its norm kept still."""
    kind = {"override": Still, "forward": StillForward}.get(mode, nn.Sequential)
    layers = nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(p), nn.Linear(16, 10)
    made = kind(*layers)
    return made.eval() if mode == "eval" else made


class Residual(nn.Module):
    """A module that is no sequence, with a parameter of its own, a buffer and perhaps a tied weight."""

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


class Decoder(nn.Module):
    """Blocks that hand a mask along; positions are a parameter of its own, and the head may be its table of tokens."""

    later: Tensor
    scale: Tensor

    def __init__(self, vocab: int = 256, width: int = 8, blocks: int = 2, tie: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, width)
        self.position = nn.Parameter(0.1 * torch.randn(16, width))
        self.register_buffer("later", torch.ones(16, 16, dtype=torch.bool).triu(1), persistent=False)
        self.register_buffer("scale", torch.full((width,), 0.5))
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, vocab, bias=False)
        if tie:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.size(1)
        assert length <= 16
        x = self.table(tokens) + self.position[:length]
        mask = self.later[:length, :length].expand(tokens.size(0), length, length)
        for block in self.blocks:
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
