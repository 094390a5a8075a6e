"""Batch normalisation over the samples of all data ranks, with the statistics of the whole batch; and with 16-bit
weights.

Model: forward, one all-reduce of (n * mean, n * (variance + mean^2), n) of each rank's own samples, in float64, gives
mean and variance of the batch. Running statistics use the unbiased variance. Backward, with y = w * x^ + b, the
gradient of one rank's x is (Ioffe and Szegedy 2015, arXiv:1502.03167)

dx = w / sigma * (dy - (S1 + x^ * S2) / N),    S1 = sum dy,  S2 = sum dy * x^   over all ranks

torch's kernel gives w / sigma * dy and the rank's own S1 and S2. One all-reduce sums S1 and S2, and the rest is one
more normalisation. The gradients of w and b are the rank's own share, and are summed with all other gradients.

Contract: equal to one process on the whole batch, within the rounding of float32, for any shares, on CPU and GPU, under
autocast and in channels-last order. Parameters, buffers and their names stay. Evaluation exchanges nothing. 16-bit
weights (level O2) are widened to the float32 of the running statistics, as torch's kernel wants one dtype.

Limits: every rank has at least one sample and runs the same layers in the same order. With several micro-batches the
statistics cover one micro-batch of each rank. In evaluation a module that tracks no running statistics uses the batch
of its own rank. torch's own SyncBatchNorm does the same, and refuses the CPU.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from dslc.compiler.trace.private_torch import AnyBatchNorm


def synchronise(module: nn.Module, group: dist.ProcessGroup | None = None) -> int:
    """Makes the batch normalisations in `module` take their statistics over `group` (None: all ranks), in place, unless
    their attribute `sync` is false; returns their number.
    """
    found = 0
    for each in module.modules():
        if isinstance(each, AnyBatchNorm) and not isinstance(each, nn.SyncBatchNorm) and getattr(each, "sync", True):
            each.__class__ = _synchronised(type(each))
            each.group = group  # type: ignore[assignment]
            found += 1
    return found


def is_synchronised(module: nn.Module) -> bool:
    return isinstance(module, _Synchronised)


def widen(module: nn.Module) -> None:
    """Makes the batch normalisations in `module` that are not synchronised accept 16-bit weights, in place."""
    for each in module.modules():
        if isinstance(each, AnyBatchNorm) and not isinstance(each, nn.SyncBatchNorm | _Wide):
            each.__class__ = derived_norm("Wide", _Wide, type(each))


def _synchronised(kind: type[AnyBatchNorm]) -> type[AnyBatchNorm]:
    return kind if issubclass(kind, _Synchronised) else derived_norm("Synchronised", _Synchronised, kind)


def derived_norm(word: str, base: type[AnyBatchNorm], kind: type[AnyBatchNorm]) -> type[AnyBatchNorm]:
    """Returns a class with the `forward` of `base`; a user's class keeps its own, whose `super()` is `base`."""
    of_torch = next(each for each in kind.__mro__ if each.__module__.startswith("torch."))
    inner = type(f"{word}{of_torch.__name__}", (base, of_torch), {"__module__": __name__})
    return inner if kind is of_torch else type(f"{word}{kind.__name__}", (kind, inner), {"__module__": kind.__module__})


class _Wide(AnyBatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        if self.weight is None or self.weight.dtype not in (torch.bfloat16, torch.float16):
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        kept = self.track_running_stats or not self.training
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return F.batch_norm(
            input,
            self.running_mean if kept else None,
            self.running_var if kept else None,
            *self._wide(),
            training=self.training or self.running_mean is None,
            momentum=self._weight_of_a_batch() if self.training and self.track_running_stats else 0.0,
            eps=self.eps,
        )

    def _wide(self) -> tuple[Tensor | None, Tensor | None]:
        return _widened(self.weight), _widened(self.bias)

    def _weight_of_a_batch(self) -> float:
        """Returns the weight of a new batch in the running statistics."""
        if self.momentum is not None:
            return self.momentum
        assert self.num_batches_tracked is not None
        return 1.0 / float(self.num_batches_tracked)


def _widened(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(_wide(tensor))


class _Synchronised(_Wide):
    group: dist.ProcessGroup | None

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        output, mean, variance, samples = _Normalise.apply(input, *self._wide(), self.eps, self.group)  # type: ignore[no-untyped-call]
        if self.track_running_stats and self.running_mean is not None:
            self._track(mean, variance, samples)
        normalised: Tensor = output
        return normalised

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, samples: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        weight = self._weight_of_a_batch()
        self.running_mean.mul_(1 - weight).add_(mean, alpha=weight)
        unbiased = samples / (samples - 1).clamp_(min=1) * variance
        self.running_var.mul_(1 - weight).add_(unbiased, alpha=weight)


def _moments(input: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean and biased variance of each channel, at least float32, by torch's own kernel."""
    scratch = (None, None)
    if input.dtype != _wide(input):
        # The kernel's result has the input's dtype unless it is given running statistics of another.
        scratch = tuple(torch.zeros(2, input.shape[1], device=input.device))
    mean, variance = torch.batch_norm_update_stats(input, *scratch, 0.0)
    return mean, variance


def _wide(input: Tensor) -> torch.dtype:
    return torch.promote_types(input.dtype, torch.float32)


class _NormaliseContext(FunctionCtx):
    saved_tensors: tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]  # input, weight, mean, variance, samples
    eps: float
    group: dist.ProcessGroup | None

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class _Normalise(torch.autograd.Function):
    """Returns (output, mean, biased variance, samples per channel) of the batch; the last three float64, without
    gradient.

    Each operation on tensors of few channels costs about a microsecond: so there are few operations, and in place.
    """

    @staticmethod
    def forward(
        ctx: _NormaliseContext,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        channels = input.shape[1]
        own = input.numel() // channels
        packed = torch.empty(2 * channels + 1, dtype=torch.float64, device=input.device)
        first, second, samples = packed.split((channels, channels, 1))
        mean, variance = _moments(input)
        torch.mul(mean, own, out=first)
        torch.mul(variance, own, out=second)
        second.addcmul_(first, first, value=1 / own)
        samples.fill_(own)
        dist.all_reduce(packed, group=group)
        first.div_(samples)
        second.div_(samples).addcmul_(first, first, value=-1).clamp_(min=0)
        mean, variance = first.to(mean.dtype), second.to(mean.dtype)
        output = F.batch_norm(input, mean, variance, weight, bias, training=False, eps=eps)
        ctx.save_for_backward(input, weight, mean, variance, samples)
        ctx.eps, ctx.group = eps, group
        ctx.mark_non_differentiable(first, second, samples)
        return output, first, second, samples

    @staticmethod
    def backward(
        ctx: _NormaliseContext, gradient: Tensor, *_: object
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        input, weight, mean, variance, samples = ctx.saved_tensors
        scale = torch.ones_like(mean) if weight is None else weight
        saved = mean.new_empty(0)  # empty, as in evaluation; the kernel for GPUs requires a tensor
        grad_input, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, input, scale, mean, variance, saved, saved, False, ctx.eps, [True, True, True]
        )
        sums = torch.stack((grad_bias, grad_weight)).double()
        dist.all_reduce(sums, group=ctx.group)
        factor = (variance + ctx.eps).rsqrt_().mul_(scale).neg_()
        shift, slope = sums.div_(samples).mul_(factor).to(scale.dtype)
        grad_input += F.batch_norm(input, mean, variance, slope, shift, training=False, eps=ctx.eps)
        if weight is None:
            return grad_input, None, None, None, None
        return grad_input, grad_weight, grad_bias, None, None
