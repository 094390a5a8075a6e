"""Batches of prepared conversations and pairs: `chat_data` makes the sequences, this module gives them to a job."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dslc.compiler.ir.program import DataStep
from dslc.runtime.data.samples import Pair, Samples, SourceError, StoredSamples
from dslc.runtime.data.sources.chat_data import PreparedSplit, prepare
from dslc.runtime.data.sources.chat_rendering import ConversationError


@dataclass(frozen=True)
class ChatSamples(StoredSamples):
    """Sequences of `length` tokens, filled up with `filler`; the target of a token that does not count is `ignore`."""

    split: PreparedSplit
    length: int
    filler: int
    ignore: int

    def __len__(self) -> int:
        return len(self.split)

    def batch(self, indices: Tensor, epoch: int = 0) -> tuple[Tensor, Tensor]:
        inputs = np.full((len(indices), self.length), self.filler, np.int64)
        targets = np.full((len(indices), self.length), self.ignore, np.int64)
        for row, index in enumerate(indices.tolist()):
            start, end = self.split.starts[index : index + 2]
            tokens, counted = self.split.tokens[start:end], self.split.counted[start + 1 : end]
            inputs[row, : end - start] = tokens
            targets[row, : end - start - 1] = np.where(counted, tokens[1:].astype(np.int64), self.ignore)
        return torch.from_numpy(inputs), torch.from_numpy(targets)


class PairSamples(StoredSamples):
    """Pairs of answers: a sample is two rows of a batch, the chosen one before the rejected one.

    Once `reference` has the log-probabilities of the rows under the reference model, (pairs, 2), a target is a pair:
    the tokens that count, and these of each row.
    """

    is_structure = True  # each micro-batch is made by itself: it has more rows than samples

    def __init__(self, rows: ChatSamples) -> None:
        self.rows = rows
        self.reference: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows) // 2

    def batch(self, indices: Tensor, epoch: int = 0) -> Pair:
        inputs, targets = self.rows.batch(torch.stack((2 * indices, 2 * indices + 1), dim=1).view(-1), epoch)
        return inputs, targets if self.reference is None else (targets, self.reference[indices].view(-1))


def open_chat(step: DataStep) -> Samples | tuple[Samples, ...]:
    """Returns the sequences of each split. Raises SourceError."""
    try:
        prepared = prepare(step.arguments)
    except ConversationError as error:
        raise SourceError(f"{step.line}: {error}") from error
    if prepared.digest != step.arguments["digest"]:
        what = "pairs" if prepared.rows > 1 else "conversations"
        raise SourceError(
            f"{step.line}: the {what} become other tokens than in the plan: the file, the tokenizer, the "
            "template, or the version of `transformers` differs"
        )
    length, filler = step.arguments["context"], step.arguments["filler"]
    rows = [ChatSamples(split, length, filler, step.ignore) for split in prepared.splits]
    samples: tuple[Samples, ...] = tuple(map(PairSamples, rows)) if prepared.rows > 1 else tuple(rows)
    return samples[0] if len(samples) == 1 else samples
