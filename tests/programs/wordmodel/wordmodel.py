"""A language model of words: a table, two layers of LSTM and the table again, by SGD with a clipped gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

WORDS, LENGTH = 50, 12


class Lines(Dataset[tuple[Tensor, Tensor]]):
    """Words that count up, by a pace of each line."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        line = (index * 7 + (1 + index % 3) * torch.arange(LENGTH + 1)) % WORDS
        return line[:-1], line[1:]


class RNNModel(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.encoder = nn.Embedding(WORDS, width)
        self.rnn = nn.LSTM(width, width, 2, batch_first=True)
        self.decoder = nn.Linear(width, WORDS)
        self.decoder.weight = self.encoder.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.decoder(self.rnn(self.encoder(words))[0])


def plain(steps: int) -> list[float]:
    torch.manual_seed(0)
    model, losses = RNNModel(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    while len(losses) < steps:
        for words, following in DataLoader(Lines(), batch_size=8):
            loss = F.cross_entropy(model(words).flatten(0, 1), following.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            losses.append(loss.item())
    return losses[:steps]
