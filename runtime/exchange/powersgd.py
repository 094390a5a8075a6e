"""Gradients as matrices of low rank: `powersgd(rank)`.

Rule: the gradient of a parameter of two or more dimensions is a matrix M of (first, rest) numbers. With the error e of
this rank and Q, both kept from the step before,

D = M + e,  P = mean over ranks of D Q,  P' = an orthonormal basis of P's columns (by QR),  Q = mean over ranks of D^T
P',  M' = P' Q^T,  e = D - M'

and M' is the gradient on all ranks. A matrix for which P and Q are no fewer numbers than itself is summed exactly, as
is every other parameter. The first Q is drawn from the seed and the parameter's name.

Source: Vogels et al. 2019, arXiv:1905.13727, algorithms 1 and 2, with the error of the mean, as the authors' code and
torch's `powerSGD_hook` keep it. The hook is not used: it keeps its state by bucket, and buckets change after the first
step and after a resume.

Model: each bucket takes two collectives: P, with all that is summed exactly, and then Q. Matrices of one shape are
multiplied together, P and Q as rows, which takes a tenth of the time on a CPU. Errors are of gradients without the
scale of half precision.

Contract: where a gradient is not finite every number of its matrix becomes nan, and e and Q stay as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslc.compiler.ir.program import ExchangeStep, JobProgram
from dslc.compiler.placement.buckets import matrix_of
from dslc.runtime.exchange.base import GradientExchange
from dslc.runtime.exchange.exchange_groups import PendingWork, mean
from dslc.runtime.model.tensor_names import named_tensors


class _ShapeGroup(NamedTuple):
    names: list[str]
    gradients: list[Tensor]
    shape: tuple[int, int]


class PowerSGD(GradientExchange):
    """Gradients of matrices in two factors, with error feedback and a warm start."""

    spreads = True

    def __init__(self, job: JobProgram, step: ExchangeStep, model: nn.Module) -> None:
        super().__init__(job, step, model)
        self._rank = int(step.arguments["rank"])
        self._shapes: dict[str, tuple[int, int]] = {}
        for name, each in named_tensors(model).items():
            shape = matrix_of(each.shape, self._rank)
            if shape is not None and each.requires_grad and name not in job.gradients.unused:
                self._shapes[name] = shape
                self.own[f"error.{name}"] = torch.zeros(shape, device=each.device)
                self.shared[f"factor.{name}"] = _initial_factor(job.seed, name, shape[1], self._rank).to(each.device)

    def hook(self, bucket: dist.GradBucket) -> None:
        self.look(bucket)
        self.going.begin(self._factors(bucket.buffer(), bucket.parameters(), bucket.gradients()))

    def _factors(
        self, bucket: Tensor, parameters: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> Iterator[PendingWork]:
        groups, exact = self._groups(parameters, gradients)
        if not groups:
            yield from mean(bucket, self.where.everyone, self.where.ranks)
            return
        scale = self._scale(bucket)
        wholes, rows = list[Tensor](), list[Tensor]()
        for group in groups:
            wholes.append(torch.stack([each.reshape(group.shape) for each in group.gradients]))
            for whole, name in zip(wholes[-1], group.names, strict=True):
                whole.addcmul_(self.own[f"error.{name}"], scale)
            factors = torch.stack([self.shared[f"factor.{name}"].mT for name in group.names])
            rows.append(torch.bmm(factors, wholes[-1].mT))
        first = torch.cat([each.reshape(-1) for each in (*exact, *rows)])
        yield from mean(first, self.where.everyone, self.where.ranks)
        parts = first.split([each.numel() for each in (*exact, *rows)])
        for gradient, part in zip(exact, parts, strict=False):
            gradient.copy_(part.view(gradient.shape))
        bases = [
            torch.linalg.qr(part.view(each.shape).mT)[0] for part, each in zip(parts[len(exact) :], rows, strict=True)
        ]
        rows = [torch.bmm(basis.mT, whole) for basis, whole in zip(bases, wholes, strict=True)]
        second = torch.cat([each.view(-1) for each in rows])
        yield from mean(second, self.where.everyone, self.where.ranks)
        for n, part in enumerate(second.split([each.numel() for each in rows])):
            self._take(groups[n], wholes[n], bases[n], part.view(rows[n].shape), scale)

    def _take(self, group: _ShapeGroup, whole: Tensor, basis: Tensor, rows: Tensor, scale: Tensor) -> None:
        """Takes the factors that are agreed on: sets the gradients of a group, and what is kept of it."""
        agreed = torch.bmm(basis, rows)
        errors = whole.sub_(agreed).div_(scale)
        finite = agreed.amin(dim=(1, 2)).isfinite() & agreed.amax(dim=(1, 2)).isfinite()
        nothing = torch.where(finite, 0.0, torch.nan)  # added to what is finite
        for n, (name, gradient) in enumerate(zip(group.names, group.gradients, strict=True)):
            gradient.copy_(agreed[n].add_(nothing[n]).view(gradient.shape))
            for kept, new in ((self.own[f"error.{name}"], errors[n]), (self.shared[f"factor.{name}"], rows[n].mT)):
                torch.where(finite[n], new, kept, out=kept)

    def _scale(self, like: Tensor) -> Tensor:
        """Returns the scale of this step's loss; 1 if there is none."""
        one = like.new_ones(())
        return self.scaler.scale(one) if self.scaler is not None else one

    def _groups(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> tuple[list[_ShapeGroup], list[Tensor]]:
        """Returns the matrices of a bucket, grouped by shape, and all other gradients."""
        groups: dict[tuple[int, int], _ShapeGroup] = {}
        exact = list[Tensor]()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            name = self.names[id(parameter)]
            if name not in self._shapes:
                exact.append(gradient)
                continue
            group = groups.setdefault(self._shapes[name], _ShapeGroup([], [], self._shapes[name]))
            group.names.append(name)
            group.gradients.append(gradient)
        return list(groups.values()), exact


def _initial_factor(seed: int, name: str, columns: int, rank: int) -> Tensor:
    """Returns the first Q of a parameter, the same on all ranks and devices."""
    told = hashlib.sha256(f"powersgd {seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(told[:8], "little", signed=True))
    return torch.randn((columns, rank), generator=generator)
