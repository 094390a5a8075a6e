"""Metrics as a user writes them, for tests: they keep states. Their names begin with `not_` where they are wrong."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class Spread:
    """The largest and smallest score, and how many tokens were seen; the mean score by class."""

    states = {"most": "max", "least": "min", "seen": "sum", "scores": "cat"}  # noqa: RUF012

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.most, self.least = torch.tensor(-torch.inf), torch.tensor(torch.inf)
        self.seen = torch.tensor(0)
        self.scores: list[Tensor] = []

    def update(self, output: Tensor, target: Tensor) -> None:
        self.most, self.least = torch.maximum(self.most, output.max()), torch.minimum(self.least, output.min())
        self.seen = self.seen + target.numel()
        self.scores.append(output.flatten(0, -2).double())

    def compute(self) -> dict[str, Tensor]:
        mean = torch.cat(self.scores).mean(0)[:3] * self.scale
        return {"most": self.most, "least": self.least, "seen": self.seen, "by_class": mean}


class Projected:
    """The sum of the scores in directions that `__init__` draws from numpy and by a module of torch."""

    states = {"total": "sum"}  # noqa: RUF012

    def __init__(self) -> None:
        self.layer = torch.nn.Linear(5, 3)
        self.direction = torch.from_numpy(np.random.rand(3))
        self.total = torch.tensor(0.0, dtype=torch.float64)

    @torch.no_grad()
    def update(self, output: Tensor, target: Tensor) -> None:
        self.total = self.total + (self.layer(output).double() @ self.direction).sum()

    def compute(self) -> Tensor:
        return self.total * self.direction[0]


class InOrder:
    """The number of the sample whose sequence scores most: states of ranks are put together in their order."""

    states = {"scores": "cat"}  # noqa: RUF012

    def __init__(self) -> None:
        self.scores = torch.zeros(0)

    def update(self, output: Tensor, target: Tensor) -> None:
        self.scores = torch.cat([self.scores, output.flatten(1).sum(1)])

    def compute(self) -> int:
        return int(self.scores.argmax())


class not_additive:
    """A running mean, whose states do not add up."""

    states = {"mean": "sum"}  # noqa: RUF012

    def __init__(self) -> None:
        self.mean, self.seen = torch.tensor(0.0), 0

    def update(self, output: Tensor, target: Tensor) -> None:
        self.seen += 1
        self.mean = self.mean + (output.abs().mean() - self.mean) / self.seen

    def compute(self) -> Tensor:
        return self.mean


class of_batches:
    """The mean of the batches' means, which depends on how samples are cut into batches."""

    states = {"total": "sum", "number": "sum"}  # noqa: RUF012

    def __init__(self) -> None:
        self.total, self.number = torch.tensor(0.0), torch.tensor(0)

    def update(self, output: Tensor, target: Tensor) -> None:
        self.total, self.number = self.total + output.mean(), self.number + 1

    def compute(self) -> Tensor:
        return self.total / self.number


class not_counting:
    def update(self, output: Tensor, target: Tensor) -> None:
        pass

    def compute(self) -> float:
        return 0.0


class not_a_number(Spread):
    def compute(self) -> str:  # type: ignore[override]
        return "much"


class not_a_tensor(Spread):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0  # type: ignore[assignment]


class half_named:
    """Counts right answers in an attribute that no state names: a tensor, or a number."""

    states = {"seen": "sum"}  # noqa: RUF012

    def __init__(self, start: str = "tensor") -> None:
        self.seen = torch.tensor(0)
        self.right: Tensor | int = torch.tensor(0) if start == "tensor" else 0
        self.batches = 0  # which nothing depends on

    def update(self, output: Tensor, target: Tensor) -> None:
        self.batches += 1
        self.seen = self.seen + len(output)
        self.right = self.right + (self._right(output, target) if isinstance(self.right, Tensor) else 1)

    def _right(self, output: Tensor, target: Tensor) -> Tensor:
        return (output.argmax(-1) == target).sum()

    def compute(self) -> Tensor:
        return self.right / self.seen


class Hits:
    """The number of hits, in the form that is asked for."""

    states = {"hits": "sum"}  # noqa: RUF012

    def __init__(self, form: str) -> None:
        self.form, self.hits = form, torch.tensor(0)

    def update(self, output: Tensor, target: Tensor) -> None:
        self.hits = self.hits + (output.argmax(-1) == target).sum()

    def compute(self) -> object:
        hits = int(self.hits)
        forms = {"yes or no": hits > 0, "list": [hits > 0], "array": np.array([1.0, 0.5]), "scalar": np.float32(0.5)}
        return forms.get(self.form, {self.form: hits})


def of_torchmetrics() -> object:
    """Returns a metric of torchmetrics that counts in a list of its own."""
    import torchmetrics

    class Listed(torchmetrics.Metric):
        full_state_update = False
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.add_state("seen", torch.tensor(0), dist_reduce_fx="sum")
            self.right: list[int] = []

        def update(self, output: Tensor, target: Tensor) -> None:
            self.seen += len(output)
            self.right.append(int((output.argmax(-1) == target).sum()))

        def compute(self) -> Tensor:
            return torch.tensor(float(sum(self.right))) / self.seen

    return Listed()


def f1() -> object:
    import torchmetrics

    return torchmetrics.F1Score(task="multiclass", num_classes=10, average="macro")
