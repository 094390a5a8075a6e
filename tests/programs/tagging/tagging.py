"""Token classification as BERT does it: sentences of unequal length, masks, and weights for rare classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

WORDS, CLASSES, IGNORED = 50, 4, -100
WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 4.0])
Batch = tuple[dict[str, Tensor], Tensor]


class Sentences:
    """Word n has class `n % 4`; each sentence has 3 to 12 words."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(index)
        length = int(torch.randint(3, 13, (1,), generator=random))
        words = torch.randint(1, WORDS, (length,), generator=random)
        return words, words % CLASSES


def padded(samples: list[tuple[Tensor, Tensor]]) -> Batch:
    words = pad_sequence([words for words, _ in samples], batch_first=True)
    classes = pad_sequence([classes for _, classes in samples], batch_first=True, padding_value=IGNORED)
    return {"words": words, "mask": words != 0}, classes


class Tagger(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encoder(self.embedding(words), src_key_padding_mask=~mask))
        return scores


def weighted(scores: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of the losses, and the sum of their weights, by which torch divides it."""
    weights = WEIGHTS.to(scores.device)
    total = F.cross_entropy(scores.flatten(0, 1), classes.flatten(), weights, ignore_index=IGNORED, reduction="sum")
    return total, weights[classes[classes != IGNORED]].sum()


def plain(steps: int) -> list[float]:
    torch.manual_seed(0)
    model = Tagger()
    losses: list[float] = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader: DataLoader[Batch] = DataLoader(Sentences(), batch_size=8, collate_fn=padded)  # type: ignore[arg-type]
    while len(losses) < steps:
        for inputs, classes in loader:
            scores = model(**inputs).flatten(0, 1)
            loss = F.cross_entropy(scores, classes.flatten(), WEIGHTS, ignore_index=IGNORED)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses[:steps]
