"""Files beside the weights in an exported folder: the tokenizer's, and the model card."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

CARD = "README.md"
_COPIED = (  # files of a tokenizer, and others that a model is used with
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
)


@dataclass(frozen=True, kw_only=True)
class CompanionFiles:
    """`folders`: where files of the tokenizer and of the generation are looked for, in this order. `card`: the text of
    the model card.
    """

    folders: tuple[str, ...]
    card: str

    def write(self, folder: str) -> None:
        """Writes the card, and copies the files that a folder has. Raises OSError."""
        with open(os.path.join(folder, CARD), "w", encoding="utf-8") as file:
            file.write(self.card)
        for name in _COPIED:
            sources = (os.path.join(source, name) for source in self.folders)
            if source := next(filter(os.path.isfile, sources), None):
                shutil.copyfile(source, os.path.join(folder, name))
