"""Data of fine-tunes of `transformers` models, as batches that are dicts: what jobs name as
`python("fine_tunes:Sentences", …)` and `python("fine_tunes:padded")`.

The collators are the library's own, with a tokenizer that is made of five words.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
)

VOCAB, SAMPLES = 40, 64


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"[PAD]": 0, "[UNK]": 1, "[MASK]": 2} | {f"w{n}": n for n in range(3, VOCAB)}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", mask_token="[MASK]")


class Sentences:
    """Sentences of unequal length with labels as `task` has them."""

    def __init__(self, task: str) -> None:
        self.task = task

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = torch.Generator().manual_seed(index)
        tokens = torch.randint(3, VOCAB, (4 + index % 5,), generator=drawn).tolist()
        sample: dict[str, Any] = {"input_ids": tokens, "attention_mask": [1] * len(tokens)}
        if self.task == "sequence_classification":
            return sample | {"token_type_ids": [n % 2 for n in range(len(tokens))], "labels": sum(tokens) % 3}
        if self.task == "token_classification":
            return sample | {"labels": [token % 3 for token in tokens]}
        if self.task == "seq2seq_lm":
            return sample | {"labels": tokens[::-1][: 2 + index % 3]}
        if self.task == "masked_lm":
            hidden = [(n + index) % 3 == 0 for n in range(len(tokens))]
            sample["input_ids"] = [2 if hide else token for token, hide in zip(tokens, hidden, strict=True)]
            return sample | {"labels": [token if hide else -100 for token, hide in zip(tokens, hidden, strict=True)]}
        if self.task == "question_answering":
            return sample | {"start_positions": index % 3, "end_positions": 1 + index % 3}
        return sample | {"labels": list(tokens)}


words = tokenizer()
by_sample = DataCollatorWithPadding(words)
by_token = DataCollatorForTokenClassification(words)
pairs = DataCollatorForSeq2Seq(words)


class Padded:
    """Pads to a multiple of a number: a class, which a job makes an object."""

    def __init__(self, multiple: int) -> None:
        self.collate = DataCollatorWithPadding(words, pad_to_multiple_of=multiple)

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        return dict(self.collate(samples))
