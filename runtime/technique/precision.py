"""Mixed precision: autocast over float32 parameters (O1), and loss scaling for float16.

Model: under O1 the forward pass and the loss run inside `autocast(step, device)`; under O2 the engine gives modules a
16-bit copy of the parameters (parallel/fsdp.py). Gradients are unscaled before they are clipped.

Contract: a step whose gradients hold an infinity or a nan is skipped and the scale halved, on all ranks or on none. If
each rank holds whole gradients, the sum over the ranks has it. If each holds some rows, torch reduces the flag over the
mesh of the gradients; over several axes all ranks reduce it. A job that skips steps that are not finite does the same
without a scale (`StepSkipper`). Numbers in float16 are as large under every engine: if a loss is multiplied to undo a
mean, the initial scale is lower by that factor.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslc.compiler.ir.program import PrecisionStep
from dslc.compiler.trace.private_torch import local_part, unscale_all


def has_autocast(step: PrecisionStep) -> bool:
    return step.dtype != "float32" and step.level != "O2"


def autocast(step: PrecisionStep, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Returns the context for the forward pass and the loss, a new one for each use; for float32 a no-op."""
    if not has_autocast(step):
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, step.dtype))


def grad_scaler(
    step: PrecisionStep, device: torch.device, loss_scale: int = 1, *, agreed: bool = False, skips: bool = False
) -> torch.amp.GradScaler:
    """Returns the loss scaler; without scaling, one whose methods pass their arguments through. `loss_scale` is the
    engine's. `agreed`: all ranks reduce the flag, as gradients are in rows on several meshes. `skips`: every step that
    is not finite is skipped, scaled or not.
    """
    scale = 2.0**16 / loss_scale
    if skips:
        return (_MultiAxisStepSkipper if agreed else StepSkipper)(device, scale if step.scaled else None)
    kind = _MultiAxisScaler if agreed else torch.amp.GradScaler
    return kind(device.type, init_scale=scale, enabled=step.scaled)


class _MultiAxisScaler(torch.amp.GradScaler):
    """A scaler for several axes: gradients are on several meshes, and each rank checks its own rows."""

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        gradients = [each.grad for group in optimizer.param_groups for each in group["params"]]
        rows = [local for each in gradients if each is not None and (local := local_part(each)).numel()]
        if rows:
            unscale_all(rows, found_inf, inv_scale)
        dist.all_reduce(found_inf, dist.ReduceOp.MAX)
        return {found_inf.device: found_inf}


class StepSkipper(torch.amp.GradScaler):
    """Skips the update of a step whose loss or gradient is not finite, and counts such steps in `skipped`, on the
    device and in checkpoints. Without an `initial` scale nothing is scaled, nor saved.
    """

    def __init__(self, device: torch.device, initial: float | None) -> None:
        super().__init__(device.type, init_scale=initial or 1.0)
        self._scaled = initial is not None
        self.skipped = torch.zeros((), device=device)
        self.found = torch.zeros((), device=device)  # positive if the last step was skipped

    def scale(self, outputs: Tensor) -> Tensor:  # type: ignore[override]
        # If the loss is not finite every gradient becomes nan, on all ranks; else this multiplies by 1.
        return super().scale(outputs) * (1 + 0 * outputs.detach())

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        for flag in found.values():  # one per device
            self.found = flag
            self.skipped += flag
        return found

    def update(self, new_scale: float | Tensor | None = None) -> None:
        super().update(new_scale if self._scaled else 1.0)

    def state_dict(self) -> dict[str, Any]:
        return (super().state_dict() if self._scaled else {}) | {"skipped": self.skipped.item()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state, which lacks `skipped` if the saved job skipped nothing, and the scale if it scaled nothing."""
        scale = dict(state_dict)
        self.skipped.fill_(scale.pop("skipped", 0.0))
        if scale:
            super().load_state_dict(scale)


class _MultiAxisStepSkipper(StepSkipper, _MultiAxisScaler):
    """Skips steps over several axes."""


def widen_model(model: nn.Module) -> None:
    """Makes the parameters and buffers of a model float64, and complex ones complex128."""
    model.double()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_complex():
            tensor.data = tensor.data.to(torch.complex128)
