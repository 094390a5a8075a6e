"""Modules that torch.nn lacks, or has in a slower form.

Model: each holds its parts as attributes that the builder adds (`runtime/model/module_builder.py`), so that a module
here is little more than its forward pass. Tensors are batch first: (batch, length, width), (batch, channels, height,
width).

Contract: correct under autocast and with 16-bit parameters; no data-dependent control flow; the names of parts are as
in the compiler's arithmetic (`compiler/model/*layers.py`), and tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dslc.runtime.model.experts.adapted_experts import AdaptedExperts
from dslc.runtime.model.experts.expert_modules import Experts, MixtureOfExperts, Router
from dslc.runtime.model.llama_modules import GatedMLP, GroupedAttention, LlamaBlock

# Classes of other files that the builder finds here.
__all__ = ["AdaptedExperts", "Experts", "GatedMLP", "GroupedAttention", "LlamaBlock", "MixtureOfExperts", "Router"]


def _expect(module: nn.Module, *parts: str) -> None:
    """Fixes the order of the parts, and so of the parameters; a part that is never set stays None."""
    for part in parts:
        module.register_module(part, None)


class Attention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017, arXiv:1706.03762).

    Parts: `qkv`, `output`, and `dropout` if there is any. The rows of `qkv` go head by head, three times `head_dim` for
    each (as in Megatron). So a share of the rows is a share of the heads. `attend` may be replaced, for example by a
    function that gathers keys and values; it takes and returns (batch, heads, length, head_dim).
    """

    qkv: nn.Module
    output: nn.Module
    dropout: nn.Module | None
    attend: Callable[..., Tensor]

    def __init__(self, head_dim: int, causal: bool = False) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.causal = causal
        self.attend = F.scaled_dot_product_attention
        _expect(self, "qkv", "output", "dropout")

    def forward(self, x: Tensor) -> Tensor:
        rows = self.qkv(x)
        batch, length, _ = rows.shape  # not of `x`, which may be a piece of the sequence that `qkv` gathers
        # Split before the heads are moved forward, so that the gradients are assembled in place.
        q, k, v = rows.view(batch, length, -1, 3, self.head_dim).unbind(3)
        y = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=self.causal)
        y = y.transpose(1, 2).reshape(batch, length, -1)
        out: Tensor = self.output(y)
        if self.dropout is not None:
            out = self.dropout(out)
        return out

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, causal={self.causal}"


class AdaptedLinear(nn.Module):
    """A frozen dense layer and the product of two small ones, which train (LoRA, Hu et al. 2021, arXiv:2106.09685).
    Names, shapes and the order of the sums are as in the library `peft`.

    Parts: `base_layer`, `lora_A`, `lora_B`, and `lora_dropout` if there is any. Each of the latter holds one module.
    """

    base_layer: nn.Module
    lora_dropout: nn.Module | None
    lora_A: nn.Module
    lora_B: nn.Module

    def __init__(self, in_features: int, out_features: int, scale: float) -> None:
        super().__init__()
        self.in_features, self.out_features, self.scale = in_features, out_features, scale
        self._disable_adapters = False  # model/adapters.py sets it while the network computes without adapters
        _expect(self, "base_layer", "lora_dropout", "lora_A", "lora_B")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x)
        if self._disable_adapters:
            return y
        change: Tensor = self.lora_B(self.lora_A(x if self.lora_dropout is None else self.lora_dropout(x)))
        return y + change * self.scale

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, scale={self.scale:g}"


class TransformerBlock(nn.Module):
    """Attention and a dense network, each normalised before and added to its input (Xiong et al. 2020,
    arXiv:2002.04745).

    Parts: `attention_norm`, `attention`, `mlp_norm`, `mlp`.
    """

    attention_norm: nn.Module
    attention: nn.Module
    mlp_norm: nn.Module
    mlp: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Residual(nn.Module):
    """The output of the part `layers`, plus the input or the output of the part `shortcut`."""

    layers: nn.Module
    shortcut: nn.Module | None

    def __init__(self) -> None:
        super().__init__()
        _expect(self, "layers", "shortcut")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x) + (x if self.shortcut is None else self.shortcut(x))
        return out


class BasicBlock(nn.Module):
    """Two convolutions beside a shortcut (He et al. 2015, arXiv:1512.03385). Parts: `conv1` … `norm2`, `shortcut`."""

    conv1: nn.Module
    norm1: nn.Module
    conv2: nn.Module
    norm2: nn.Module
    shortcut: nn.Module | None

    def __init__(self) -> None:
        super().__init__()
        _expect(self, "conv1", "norm1", "conv2", "norm2", "shortcut")

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class Bottleneck(nn.Module):
    """Three convolutions, the middle one narrow, beside a shortcut. Parts: `conv1` … `norm3`, `shortcut`."""

    conv1: nn.Module
    norm1: nn.Module
    conv2: nn.Module
    norm2: nn.Module
    conv3: nn.Module
    norm3: nn.Module
    shortcut: nn.Module | None

    def __init__(self) -> None:
        super().__init__()
        _expect(self, "conv1", "norm1", "conv2", "norm2", "conv3", "norm3", "shortcut")

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class DocumentPositions(Protocol):
    """Knows the position of each token in its document."""

    @property
    def places(self) -> Tensor:
        """The positions, int64 of shape (batch, length)."""


class PositionalEmbedding(nn.Module):
    """Adds a learned vector for each position: rows of `weight`, (context, width).

    The input is the beginning of a sequence or, with `piece`, the piece of that number, of equal pieces.
    """

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(context, width))
        self.piece = 0
        self.documents: DocumentPositions | None = None  # positions begin anew in each

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if self.documents is not None:
            return x + F.embedding(self.documents.places, self.weight)
        # The whole weight if it fits: a slice would cost a zero-filled gradient.
        if length == self.weight.shape[0]:
            return x + self.weight
        first_position = self.piece * length
        return x + self.weight[first_position : first_position + length]


class PatchEmbedding(nn.Module):
    """Square patches of (batch, channels, height, width), row by row, each mapped to a vector; positions are added.

    Part: `projection`, a convolution whose stride is its kernel.
    """

    projection: nn.Module

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.empty(patches, width))

    def forward(self, x: Tensor) -> Tensor:
        # One copy into the order of sequences before all work on it is faster than permuted strides.
        patches: Tensor = self.projection(x).flatten(2).transpose(1, 2).contiguous()
        return patches + self.position


class RMSNorm(nn.RMSNorm):
    """Root mean square norm; the weight is cast to the input's dtype, as torch's fused kernel needs it."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class LSTM(nn.LSTM):
    """An LSTM over (batch, length, width) that returns only the sequence of its states."""

    def __init__(self, **arguments: int | bool) -> None:
        super().__init__(batch_first=True, **arguments)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        states: Tensor = super().forward(x)[0]
        return states.contiguous()  # the kernel's own order is length first; a stage can only send what is contiguous


class LastStep(nn.Module):
    """(batch, length, width) -> (batch, width), the last position: a copy, which does not keep the others alive."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, -1].contiguous()


class MeanSteps(nn.Module):
    """(batch, length, width) -> (batch, width), the mean over the positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class BatchNorm1d(nn.BatchNorm1d):
    """torch's; `sync` asks for the statistics of all data ranks."""

    def __init__(self, *, sync: bool = True, **arguments: float) -> None:
        super().__init__(**arguments)  # type: ignore[arg-type]
        self.sync = sync


class BatchNorm2d(nn.BatchNorm2d):
    """torch's; `sync` asks for the statistics of all data ranks."""

    def __init__(self, *, sync: bool = True, **arguments: float) -> None:
        super().__init__(**arguments)  # type: ignore[arg-type]
        self.sync = sync
