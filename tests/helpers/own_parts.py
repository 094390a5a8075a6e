"""Data, networks, losses, steps, hooks and the like as users write them, for the jobs that own_parts_drawn.py draws.

Each is the same training however its batches are divided: padding is masked, routing is by sample, and each loss counts
what it is a sum of.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

WORDS, CLASSES, WIDTH, CODE = 23, 4, 8, 5

# ------------------------------------------------------------------------------------------------------------- data


class Points:
    """Samples ({"x", "kind"}, target), or ((x, kind), target); a target is a class, or with `named` a dict."""

    def __init__(self, samples: int = 46, form: str = "dict", named: bool = False, first: int = 0) -> None:
        self.samples, self.form, self.named, self.first = samples, form, named, first

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        random = torch.Generator().manual_seed(self.first + index)
        x, kind = torch.randn(6, generator=random), index % 3
        label = int(x[:CLASSES].argmax())
        input = {"x": x, "kind": kind} if self.form == "dict" else (x, kind)
        return input, {"label": label, "value": x[:2].sum()} if self.named else label


def points(**arguments: Any) -> tuple[Points, Points]:
    return Points(**arguments), Points(**{**arguments, "samples": 11}, first=1000)


class Sentences:
    """Words and a class for each, 2 to 9 of them; the noise of a sample is drawn when it is read."""

    def __init__(self, samples: int = 41, noise: bool = False) -> None:
        self.samples, self.noise = samples, noise

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(index)
        words = torch.randint(1, WORDS, (2 + index * 5 % 8,), generator=random)
        if self.noise:
            words = torch.where(torch.rand(len(words)) < 0.2, torch.randint(1, WORDS, (len(words),)), words)
        return words, words % CLASSES


def length(sample: tuple[Tensor, Tensor]) -> int:
    return len(sample[0])


def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[dict[str, Tensor], Tensor]:
    words = pad_sequence([words for words, _ in samples], batch_first=True)
    classes = pad_sequence([classes for _, classes in samples], batch_first=True, padding_value=-100)
    return {"words": words, "mask": words != 0}, classes


def together(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """A whole batch, for a network that returns its loss."""
    words, classes = padded(samples)
    return {**words, "labels": classes}


class Texts:
    """Whole samples of equal lengths: words, and labels of which some do not count."""

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(index)
        words = torch.randint(1, WORDS, (6,), generator=random)
        labels = torch.where(torch.rand(6, generator=random) < 0.3, -100, words % CLASSES)
        return {"words": words, "labels": labels}


class Sequences(Texts):
    """The same samples as tuples."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(super().__getitem__(index).values())


class Rivals:
    def __len__(self) -> int:
        return 34

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=random), torch.randn(CODE, generator=random)


# --------------------------------------------------------------------------------------------------------- networks


class Mixed(nn.Module):
    """Scores of classes from numbers and a kind. `looks`: each sample is worked on by the expert that it chooses."""

    def __init__(self, looks: bool = False, named: bool = False, idle: bool = False) -> None:
        super().__init__()
        self.kinds = nn.Embedding(3, WIDTH)
        self.enter = nn.Linear(6, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3 if looks else 1))
        self.head, self.value = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)
        self.spare = nn.Linear(2, 2) if idle else None  # no step uses it
        self.scale = nn.Parameter(torch.ones(1))
        self.looks, self.named = looks, named

    def forward(self, x: Tensor, kind: Tensor) -> Any:
        hidden = torch.tanh(self.enter(x) + self.kinds(kind))
        if self.looks:
            mixed = torch.zeros_like(hidden)
            for number, expert in enumerate(self.experts):
                rows = (x[:, :3].argmax(1) == number).nonzero().flatten()
                if len(rows):
                    mixed = mixed.index_add(0, rows, expert(hidden[rows]).to(hidden.dtype))
            hidden = hidden + (mixed if self.scale.item() > 0 else -mixed)
        else:
            hidden = hidden + torch.tanh(self.experts[0](hidden))
        scores = self.head(hidden) * self.scale
        return {"scores": scores, "value": self.value(hidden)[:, 0]} if self.named else scores


class Tagger(nn.Module):
    """A class for each word, from it and the mean of its sentence."""

    def __init__(self, recurrent: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.past = nn.GRU(WIDTH, WIDTH, batch_first=True) if recurrent else None
        self.mean, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, words: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden: Tensor = self.embedding(words)
        if self.past is not None:
            hidden = hidden + self.past(hidden)[0]
        kept = torch.ones_like(hidden) if mask is None else mask[..., None].to(hidden.dtype).expand_as(hidden)
        mean = (hidden * kept).sum(1) / kept.sum(1)
        scores: Tensor = self.head(torch.tanh(hidden + self.mean(mean)[:, None]))
        return scores


class Teller(nn.Module):
    """Returns its loss: `gives` says in which form."""

    def __init__(self, gives: str = "mean") -> None:
        super().__init__()
        self.body, self.gives = Tagger(), gives

    def forward(self, words: Tensor, labels: Tensor, mask: Tensor | None = None) -> Any:
        scores, wanted = self.body(words, mask), labels
        if self.gives == "shifted":
            scores, wanted = scores[:, :-1], labels[:, 1:]
        losses = F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), ignore_index=-100, reduction="none")
        number = wanted.ne(-100).sum()
        each = losses.view(wanted.shape).sum(1) / wanted.shape[1]
        match self.gives:
            case "each":
                return each
            case "pair":
                return {"loss": (losses.sum(), number), "scores": scores}
            case "further":
                return {"loss": (each, {"size": scores.square().mean((1, 2)), "least": each.detach()})}
            case "samples":
                return {"loss": each.mean()}
        return {"loss": losses.sum() / number.clamp(min=1), "scores": scores}


class Layered(nn.Module):
    """Blocks that can be stages. It takes words and, if it is given them, labels, and returns its scores and loss:
    `gives` says in which form.
    """

    def __init__(self, gives: str = "dict") -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head, self.gives = nn.Linear(WIDTH, CLASSES), gives

    def forward(self, words: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Any:
        hidden = self.embedding(words)
        for block in self.blocks:
            hidden = hidden + block(hidden).cumsum(1)
            if mask is not None:
                hidden = hidden * mask[..., None]
        scores = self.head(hidden)
        if labels is None:
            return {"scores": scores, "size": hidden.square().mean((1, 2))}
        loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)
        match self.gives:
            case "scores first":
                return scores, loss
            case "loss first":
                return loss, scores, (hidden, None)
            case "ModelOutput":
                from transformers.modeling_outputs import CausalLMOutput

                return CausalLMOutput(loss=loss, logits=scores)
        return {"scores": scores, "loss": loss}


class Attentive(nn.Module):
    """Blocks with causal attention, of words and their kinds. It returns its loss if it is given labels."""

    def __init__(self, mixes: str = "") -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(WORDS, WIDTH), nn.Embedding(3, WIDTH)
        self.places = nn.Embedding(16, WIDTH)
        # Without biases: those of keys have no gradient but rounding, which AdamW makes large.
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.head, self.mixes = nn.Linear(WIDTH, CLASSES), mixes

    def forward(
        self, words: Tensor, kinds: Tensor, labels: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Any:
        if position_ids is None:
            position_ids = torch.arange(words.shape[1], device=words.device)[None]
        kinds = kinds if kinds.dim() > 1 else kinds[:, None]
        hidden = self.words(words) + self.kinds(kinds) + self.places(position_ids)
        for block in self.blocks:
            query, key, value = block(hidden)[:, None].chunk(3, -1)
            hidden = hidden + F.scaled_dot_product_attention(query, key, value, is_causal=True)[:, 0]
        scores = self.head(hidden)
        if labels is None:
            return {"scores": scores, "hidden": hidden}
        if self.mixes == "shift":
            scores, labels = scores[:, :-1], labels[:, 1:]
        loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return scores, loss.sqrt() if self.mixes == "root" else loss


class Kinds(Texts):
    """Words with their kinds, and labels, of which some do not count; with `pair` as (input, target), of which the
    target is a tensor if it is `bare`.
    """

    def __init__(self, pair: bool = False, whole: bool = False, bare: bool = False) -> None:
        self.pair, self.whole, self.bare = pair, whole, bare

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        input = {"words": sample["words"], "kinds": sample["words"][0] % 3 if self.whole else sample["words"] % 3}
        if self.bare:
            return input, sample["labels"]
        return (input, {"label": sample["labels"]}) if self.pair else input | {"labels": sample["labels"]}


class Masked(Texts):
    """Pairs of structures: words with a mask, and labels with another part."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        return {"words": sample["words"], "mask": (sample["words"] % 5 > 0).float()}, {"label": sample["labels"]}


class Uncertain(Mixed):
    """Returns a parameter beside its scores, by which the losses are weighted."""

    def __init__(self) -> None:
        super().__init__(named=True)
        self.weights = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, kind: Tensor) -> Any:
        return super().forward(x, kind) | {"weights": self.weights}


class Told(nn.Module):
    """Returns its loss in an object of a class that torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Tagger()

    def forward(self, words: Tensor, labels: Tensor) -> Any:
        losses = F.cross_entropy(self.body(words).flatten(0, 1), labels.flatten(), reduction="sum")
        return SimpleNamespace(loss=(losses, labels.ne(-100).sum()))


class Duel(nn.Module):
    """Two networks with a part that both use; `alone` lets one of them have nothing shared."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(CODE, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 6))
        self.judge = nn.Sequential(nn.Linear(6, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1), nn.Flatten(0))
        self.scale = nn.Parameter(torch.ones(6)) if shared else None

    def make(self, codes: Tensor) -> Tensor:
        made: Tensor = self.maker(codes)
        return made if self.scale is None else made * self.scale

    def forward(self, real: Tensor, codes: Tensor) -> Tensor:
        """The loss that evaluations use."""
        return judged(self.judge(real), True) + judged(self.judge(self.make(codes)), False)


# ----------------------------------------------------------------------------------------------- losses and metrics


def classified(output: Any, target: Any) -> Tensor:
    """One for each sample, or token."""
    scores, labels = _both(output, target)
    if scores.dim() == 3:
        losses = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
        return losses.view(labels.shape)
    losses = F.cross_entropy(scores, labels, reduction="none")
    if isinstance(output, dict) and isinstance(target, dict):
        losses = losses + 0.5 * (output["value"] - target["value"]).square()
    return losses


def flattened(output: Any, target: Any) -> Tensor:
    """One for each token, in a row."""
    return classified(output, target).flatten()


def weighed(output: Any, target: Any) -> tuple[Tensor, Tensor]:
    """A sum and its weights."""
    scores, labels = _both(output, target)
    weights = torch.tensor([0.5, 1.0, 2.0, 1.5])
    scores = scores.flatten(0, -2).float()
    total = F.cross_entropy(scores, labels.flatten(), weights, ignore_index=-100, reduction="sum")
    return total, weights[labels[labels != -100]].sum()


def told(output: Any, target: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """A sum and a count, and further losses."""
    scores, labels = _both(output, target)
    flat = F.cross_entropy(scores.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="none")
    size = scores.square().flatten(1).sum(1) / (labels.view(len(labels), -1) != -100).sum(1)
    return flat.sum(), (labels != -100).sum(), {"entropy": flat.view(len(labels), -1).sum(1), "size": 0 * size + 1}


def each_told(output: Any, target: Any) -> tuple[Tensor, dict[str, Tensor]]:
    losses = classified(output, target)
    return losses, {"twice": 2 * losses.detach().flatten(1).sum(1) if losses.dim() > 1 else 2 * losses.detach()}


def balanced(output: Any, target: Any) -> Tensor:
    first = F.cross_entropy(output["scores"], target["label"], reduction="none")
    second, weights = (output["value"] - target["value"]).square(), output["weights"]
    return first * weights[0].neg().exp() + second * weights[1].neg().exp() + weights.sum()


def seldom(output: Any, target: Any) -> tuple[Tensor, Tensor]:
    """Of two classes alone: where a batch has none of them, a constant."""
    rows = target["label"] % 2 == 0
    if not rows.any():
        return torch.zeros(()), torch.tensor(0)
    return (output["value"] - target["value"])[rows].square().sum(), rows.sum()


def against_others(output: Any, target: Any) -> Tensor:
    """Compares each sample with the others of its batch."""
    scores = _both(output, target)[0]
    return F.cross_entropy(scores @ scores.T, torch.arange(len(scores)), reduction="none")


def _both(output: Any, target: Any) -> tuple[Tensor, Tensor]:
    return output["scores"] if isinstance(output, dict) else output, target["label"] if isinstance(
        target, dict
    ) else target


def counted(output: Any, target: Any, shift: int = 0) -> tuple[Tensor, Tensor]:
    """A sum over the positions, and their number; with `shift` each is compared with the next label."""
    length = target["label"].shape[1]
    scores, labels = output["scores"][:, : length - shift], target["label"][:, shift:]
    total = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum()


class Spread:
    """The sum of the squared scores, and their number."""

    states = {"total": "sum", "seen": "sum", "most": "max"}  # noqa: RUF012

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.total, self.seen, self.most = torch.tensor(0.0), torch.tensor(0), torch.tensor(-torch.inf)

    def update(self, output: Any, target: Any) -> None:
        scores, labels = _both(output, target)
        kept = scores[labels != -100].double()
        self.total, self.seen = self.total + kept.square().sum(), self.seen + len(kept)
        self.most = torch.maximum(self.most, kept.max())

    def compute(self) -> dict[str, Tensor]:
        return {"spread": self.scale * self.total / self.seen, "most": self.most}


def sized(output: Any, target: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """A sum and a count over all parts of an output, and a further loss."""
    total, number = weighed(output, target)
    return total + 0.1 * output["size"].sum(), number, {"size": output["size"]}


# ------------------------------------------------------------------------------------------------------------ steps


def judged(scores: Tensor, real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)), reduction="none")


def duel(training: Any, batch: tuple[Tensor, Tensor], form: str = "each") -> Any:
    """Two updates; `form`: of the losses that it gives."""
    real, codes = batch
    model = training.model
    made = model.make(codes)
    losses = judged(model.judge(real), True) + judged(model.judge(made.detach()), False)
    training.update((losses.sum(), torch.tensor(len(losses))) if form == "pair" else losses, "judge")
    fooled = judged(model.judge(made), True)
    training.update(fooled, "maker", *(["scale"] if model.scale is not None else []))
    return (losses.sum(), torch.tensor(len(losses))) if form == "pair" else (losses, {"fooled": fooled})


def thrice(training: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The judge twice, and the maker in every other step."""
    real, codes = batch
    model = training.model
    for _ in range(2):
        losses = judged(model.judge(real), True) + judged(model.judge(model.make(codes).detach()), False)
        training.update(losses, "judge")
    if training.step % 2 == 0:
        training.update(judged(model.judge(model.make(codes)), True), "maker")
    return losses


def at_once(training: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """One update of everything, by the loss that the network returns."""
    losses: Tensor = training.model(*batch)
    training.update(losses)
    return losses


# ------------------------------------------------------------------------------------------------ hooks and loggers


class Shrinks:
    """Makes the weights smaller, after each step, on all ranks."""

    def __init__(self, by: float = 0.99) -> None:
        self.by = by

    @torch.no_grad()
    def after_step(self, context: Any) -> None:
        for parameter in context.model.parameters():
            if parameter.requires_grad:
                parameter.mul_(self.by)


class Halves:
    """Halves the gradients, on all ranks."""

    @torch.no_grad()
    def after_backward(self, context: Any) -> None:
        for parameter in context.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class Counts:
    """Counts the steps of the training, over its resumes, and holds that none is missing."""

    def __init__(self) -> None:
        self.steps = 0

    def after_step(self, context: Any) -> None:
        self.steps += 1
        assert self.steps == context.step, f"{self.steps} steps were counted until step {context.step}"

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class Keeps:
    """A logger that keeps the records, and holds that each can be written."""

    def __init__(self) -> None:
        self.records: list[str] = []

    def log(self, record: dict[str, Any]) -> None:
        self.records.append(json.dumps(record))

    def close(self) -> None:
        assert self.records
