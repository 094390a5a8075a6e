"""The task of a `transformers` model, as far as its configuration file says it: read with the standard library."""

from __future__ import annotations

import json
import os

from dslc.dsl.files import read_bytes
from dslc.dsl.language.layers import TransformersNetwork

_MOST = 1 << 22  # bytes of a configuration

_HEADS = {  # by the ends of the names in `architectures`
    "ForCausalLM": "causal_lm",
    "LMHeadModel": "causal_lm",
    "ForMaskedLM": "masked_lm",
    "ForConditionalGeneration": "seq2seq_lm",
    "ForSequenceClassification": "sequence_classification",
    "ForTokenClassification": "token_classification",
    "ForQuestionAnswering": "question_answering",
    "ForImageClassification": "image_classification",
}
# The part of a batch that the library's loss is the mean of, by tokens, and its entries without a prediction.
_OF_TOKENS = {"causal_lm": 1, "masked_lm": 0, "seq2seq_lm": 0, "token_classification": 0}


def configuration_file(network: TransformersNetwork, folder: str) -> str | None:
    """Returns the `config.json` of a network; None if its name is one of the library's types."""
    path = os.path.join(folder, os.path.expanduser(network.path))
    if os.path.isdir(path):
        return os.path.join(path, "config.json")
    return path if path.endswith(".json") or "/" in network.path else None


def written_task(network: TransformersNetwork, folder: str) -> str | None:
    """Returns the task that the job or the file's `architectures` name; None for neither, or for a file that cannot be
    read, which is reported where the model is made.
    """
    if network.task is not None:
        return network.task
    file = configuration_file(network, folder)
    try:
        names = [str(name) for name in json.loads(read_bytes(file or "", _MOST)).get("architectures") or ()]
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return None
    return next((task for name in names for end, task in _HEADS.items() if name.endswith(end)), None)


def mean_of(network: TransformersNetwork, folder: str) -> dict[str, object]:
    """Returns the arguments of `own()` for the loss of the library: a mean over labels, or over samples."""
    shift = _OF_TOKENS.get(written_task(network, folder) or "")
    return {} if shift is None else {"mean_of": "labels", "shift": shift}
