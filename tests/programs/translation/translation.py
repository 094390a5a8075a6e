"""An encoder and decoder: a sentence comes in, its reverse goes out, both padded; a dict goes in, tokens count."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

TOKENS, BEGIN, PAD = 20, 1, 0
Batch = dict[str, Tensor]


class Pairs:
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Batch:
        random = torch.Generator().manual_seed(index)
        length = int(torch.randint(3, 9, (1,), generator=random))
        words = torch.randint(2, TOKENS, (length,), generator=random)
        return {"source": words, "target": torch.cat([torch.tensor([BEGIN]), words.flip(0)])}


def padded(samples: list[Batch]) -> Batch:
    return {name: pad_sequence([s[name] for s in samples], True, PAD) for name in ("source", "target")}


class Translator(nn.Module):
    """Returns the sum of the losses of the tokens, and their number."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, width), nn.Embedding(16, width)
        self.transformer = nn.Transformer(width, 4, 1, 1, 2 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, TOKENS)

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        given, wanted = target[:, :-1], target[:, 1:]
        ahead = torch.ones(given.shape[1], given.shape[1], dtype=torch.bool, device=given.device).triu(1)
        masks = {"src_key_padding_mask": source == PAD, "memory_key_padding_mask": source == PAD}
        states = self.transformer(self._read(source), self._read(given), tgt_mask=ahead, **masks)
        total = F.cross_entropy(self.head(states).flatten(0, 1), wanted.flatten(), ignore_index=PAD, reduction="sum")
        return total, (wanted != PAD).sum()

    def _read(self, words: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(words) + self.places(torch.arange(words.shape[1], device=words.device))
        return embedded


def plain(steps: int) -> list[float]:
    torch.manual_seed(0)
    model = Translator()
    losses: list[float] = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader: DataLoader[Batch] = DataLoader(Pairs(), batch_size=8, collate_fn=padded)  # type: ignore[arg-type]
    while len(losses) < steps:
        for batch in loader:
            total, number = model(**batch)
            loss = total / number
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses[:steps]
