"""A job of a test's own, and sixteen faults of the runtime that it plants on its ranks under a plan of two.

`DSLC_FAULT` names the fault. It is planted when the network is made, on ranks alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 12


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, WIDTH), nn.LayerNorm(WIDTH)
        self.activation, self.dropout = nn.Tanh(), nn.Dropout(0.2)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.dropout(self.activation(self.norm(self.first(x)))))
        return out


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(96, 6, generator=random)
        self.targets = torch.randint(3, (96,), generator=random)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def data() -> Samples:
    return Samples()


def net() -> Net:
    made = Net()
    fault = os.environ.get("DSLC_FAULT", "")
    if fault and os.environ.get("WORLD_SIZE") == "2":
        FAULTS[fault][0](made)
    return made


def _wrap(owner: object, name: str, change: Callable[..., Any]) -> None:
    """Replaces a function by `change`, which is called with the function and its arguments."""
    function = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **named: change(function, *arguments, **named))


def _rank() -> int:
    return int(os.environ["RANK"])


def _sum_in_place_of_mean(made: Net) -> None:
    from dslc.runtime.step import stepper

    _wrap(stepper, "share_of_mean", lambda function, summed, ranks, number: function(summed, 1, number))


def _lost_micro_batch(made: Net) -> None:
    from dslc.runtime.step import stepper

    calls = iter(range(1_000_000))
    _wrap(
        stepper.MeanBackward,
        "run",
        lambda function, backward, summed, number: function(backward, summed * (next(calls) % 2), number),
    )


def _wrong_count(made: Net) -> None:
    from dslc.runtime.step import stepper

    def count_more(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        number, agreed = function(*args, **named)
        return number + 1, agreed

    _wrap(stepper, "global_count", count_more)


def _no_exchange(made: Net) -> None:
    kind: Any = nn.parallel.DistributedDataParallel
    kind.require_backward_grad_sync = property(lambda self: False, lambda self, value: None)


def _not_clipped(made: Net) -> None:
    from dslc.runtime.step import stepper

    _wrap(
        stepper,
        "clipped",
        lambda function, parameters, counted, limit, *more: function(parameters, counted, None, *more),
    )


def _norm_of_half(made: Net) -> None:
    from dslc.runtime.step import stepper

    def count_half(function: Callable[..., Any], parameters: Any, counted: Any, *more: Any) -> Any:
        return function(parameters, [place % 2 == 0 for place in range(len(counted))], *more)

    _wrap(stepper, "clipped", count_half)


def _late_rate(made: Net) -> None:
    from dslc.runtime import train

    _wrap(train, "set_learning_rate", lambda function, optimizer, factor: function(optimizer, 1.001 * factor))


def _decays_all(made: Net) -> None:
    def step(function: Callable[..., Any], optimizer: torch.optim.Optimizer, *args: Any) -> Any:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.01  # also for what `no_decay` names
        return function(optimizer, *args)

    _wrap_method(torch.optim.AdamW, step)


def _idle_rank(made: Net) -> None:
    if _rank() == 1:
        _wrap_method(torch.optim.AdamW, lambda function, optimizer, *args: None)


def _forgotten_moment(made: Net) -> None:
    def step(function: Callable[..., Any], optimizer: torch.optim.Optimizer, *args: Any) -> Any:
        for state in optimizer.state.values():
            state["exp_avg"].zero_()
        return function(optimizer, *args)

    _wrap_method(torch.optim.AdamW, step)


def _flipped_bit(made: Net) -> None:
    def step(function: Callable[..., Any], optimizer: torch.optim.Optimizer, *args: Any) -> Any:
        result = function(optimizer, *args)
        if _rank() == 1:
            flat = optimizer.param_groups[0]["params"][0].data.view(-1)
            flat[3:4].view(torch.int32).bitwise_xor_(1 << 20)
        return result

    _wrap_method(torch.optim.AdamW, step)


def _wrap_method(kind: Any, change: Callable[..., Any]) -> None:
    function = kind.step
    kind.step = lambda optimizer, *args: change(function, optimizer, *args)


def _same_samples(made: Net) -> None:
    from dslc.runtime.data import sampler

    _wrap(sampler, "piece", lambda function, size, parts, part: function(size, parts, 0))


def _other_epsilon(made: Net) -> None:
    made.norm.eps = 1e-3


def _other_activation(made: Net) -> None:
    made.activation.register_forward_hook(lambda module, args, output: output * (1 + 1e-5))


def _other_draws(made: Net) -> None:
    from dslc.runtime.technique import sample_draws

    def draw_later(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        return function(*args, **named | {"step": named["step"] + 1})

    _wrap(sample_draws, "SamplePass", draw_later)


def _wrong_backward(made: Net) -> None:
    def grow(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return (inputs[0] * (1 + 1e-4),)

    made.activation.register_full_backward_hook(grow)


# What the comparison of copies after the first step says, which ends the training.
DIFFERENT_COPIES = "after step 1, `first.weight` is not the same on rank 0 and rank 1"
# Of each fault: what plants it, and what is named, as a pattern.
FAULTS: dict[str, tuple[Callable[[Net], None], str]] = {
    "a sum of gradients in place of a mean": (_sum_in_place_of_mean, "the gradient of `last.bias`"),
    "a micro-batch lost": (_lost_micro_batch, "the gradient of `last.bias`"),
    # The sum over both ranks is on its way: it is added to that or to a rank's own number.
    "a wrong count": (_wrong_count, "the divisor of the losses: 24 in A and (25|13) in B"),
    "no exchange": (_no_exchange, DIFFERENT_COPIES),
    # Adam's first step depends on the size of the gradient where that is close to its epsilon.
    "not clipped": (_not_clipped, "`.*` after the update"),
    "the norm of half": (_norm_of_half, "the norm of the gradient"),
    "another rate": (_late_rate, "the learning rate: "),
    "decay of all": (_decays_all, "`first.bias` after the update"),
    "an idle rank": (_idle_rank, DIFFERENT_COPIES),
    "a forgotten moment": (_forgotten_moment, "`first.weight` after the update"),
    "a flipped bit": (_flipped_bit, DIFFERENT_COPIES),
    "samples twice": (_same_samples, "the samples: A alone has "),
    "another epsilon": (_other_epsilon, "the output of `norm`"),
    "another activation": (_other_activation, "the output of `activation`"),
    "other draws": (_other_draws, "the output of `dropout`"),
    "a wrong backward pass": (_wrong_backward, "the gradient of `norm.bias`"),
}
