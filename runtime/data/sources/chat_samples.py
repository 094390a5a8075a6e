"""Batches of prepared conversations: `chat_data` makes the sequences, this module gives them to the training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dslc.compiler.ir.program import DataStep
from dslc.runtime.data.samples import Samples, SourceError, StoredSamples
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


def open_chat(step: DataStep) -> Samples | tuple[Samples, ...]:
    """Returns the sequences of each split. Raises SourceError."""
    try:
        prepared = prepare(step.arguments)
    except ConversationError as error:
        raise SourceError(f"{step.line}: {error}") from error
    if prepared.digest != step.arguments["digest"]:
        raise SourceError(
            f"{step.line}: the conversations become other tokens than in the plan: the file, the tokenizer, the "
            "template, or the version of `transformers` differs"
        )
    length, filler = step.arguments["context"], step.arguments["filler"]
    samples = tuple(ChatSamples(split, length, filler, step.ignore) for split in prepared.splits)
    return samples[0] if len(samples) == 1 else samples
