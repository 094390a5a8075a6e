"""Models of the `transformers` library, built from a configuration; initial_weights.py loads weights.

Model: the name is a folder with a `config.json`, such a file, or one of the library's types (`gpt2`, `llama`, `bert`),
looked up in this order; nothing is downloaded. The arguments replace the configuration's own values. The kind of model
is the program's; a classifier has as many labels as the data has classes unless the file or an argument says otherwise.

Contract: names in the state dict are the library's own. `forward(input)` returns the logits, one tensor; where batches
are structures, `forward` is the library's own, with the parts of a batch as its arguments, and the loss is among its
results. Nothing is cached from call to call. Parameters are float32, in training mode. Every module with parameters or
buffers has a `reset_parameters`, which sets the library's initial values for it alone.

Padding: with `pad` the model gets an attention mask that excludes this token. Sequences must be padded at their end, as
a model with learned positions counts from the beginning. On a GPU the library reads the mask in each forward pass, for
which the host waits.

Limits: architectures whose code comes with the weights (`auto_map`) are not run. `reset_parameters` leaves out a
parent's changes to a module's initial values (GPT-2 narrows the last projection of each branch).
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dslc.compiler.facts.untrusted_files import read_json
from dslc.compiler.ir.program import TransformersStep
from dslc.runtime.model.errors import ModelError
from dslc.runtime.model.tensor_names import named_tensors
from dslc.runtime.process.vision_library import let_torchvision_load

_CONFIGURATION_LIMIT = 1 << 22  # bytes of a configuration
_AUTO = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "question_answering": "AutoModelForQuestionAnswering",
    "image_classification": "AutoModelForImageClassification",
}
_WORDS = {
    "causal_lm": "that predicts the next token",
    "masked_lm": "that fills in tokens",
    "seq2seq_lm": "that writes a sequence for another",
    "sequence_classification": "that classifies sequences",
    "token_classification": "that classifies tokens",
    "question_answering": "that finds answers",
    "image_classification": "that classifies images",
}
_OF_THE_FILE = (
    "model_type",
    "transformers_version",
    "architectures",
    "auto_map",
    "_name_or_path",
    "dtype",
    "torch_dtype",
)


class TransformersError(ModelError):
    """The configuration makes no model. `argument` is the one at fault, `path` for the name."""

    def __init__(self, message: str, argument: str = "path") -> None:
        super().__init__(message)
        self.argument = argument


def build_transformers(step: TransformersStep) -> nn.Module:
    """Returns the model on the current default device, its values drawn from torch's generator.

    Raises TransformersError; ImportError if the library is not installed.
    """
    with quiet():
        let_torchvision_load()  # which it imports
        import transformers

        config, kind = _config(step)
        auto = getattr(transformers, _AUTO[kind])
        if type(config) not in auto._model_mapping:
            raise TransformersError(f"`{config.model_type}` has no model {_WORDS[kind]}, which the job asks for")
        try:
            model = auto.from_config(config, dtype=torch.float32)
        except Exception as error:  # any kind: the library checks configurations by using them
            raise TransformersError(f"the configuration gives no model: {_line(error)}") from error
    if not step.structured:
        _plain(model, step.pad)
    for module in model.modules():
        if any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            module.reset_parameters = functools.partial(model._init_weights, module)
    made: nn.Module = model.train()
    return made


def save_configuration(step: TransformersStep, folder: str) -> dict[str, tuple[int, ...]]:
    """Writes the configuration that `from_pretrained` needs into `folder`. Returns the shapes of the tensors that the
    weights must hold. Raises TransformersError and OSError.
    """
    configuration = _file(step) or {}
    with torch.device("meta"):
        model: Any = build_transformers(step)
    config = model.config
    config.architectures = [type(model).__name__]
    config.dtype = torch.float32
    config.use_cache = {**configuration, **step.arguments}.get("use_cache", True)  # which a training does without
    with quiet():
        config.save_pretrained(folder)
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}


def preload(step: TransformersStep) -> None:
    """Imports the library and the model's module, which takes seconds, in the process that forks the ranks."""
    with contextlib.suppress(ImportError, ModelError), quiet():
        let_torchvision_load()
        import transformers

        config, kind = _config(step)
        getattr(transformers, _AUTO[kind])._model_mapping.get(type(config), None)


def check_configuration(step: TransformersStep) -> None:
    """Makes the configuration alone, which takes neither data nor time. Raises as `build_transformers` does."""
    with quiet():
        _config(step)


def longest(model: nn.Module) -> int | None:
    """Returns the longest sequence that the model has learned positions for; None if it computes them."""
    length = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(length, int):
        return None
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return length if length in tables else None


def padding_of(model: nn.Module) -> int | None:
    """Returns the configuration's padding token."""
    token = getattr(model.config, "pad_token_id", None)
    return token if isinstance(token, int) else None


@contextlib.contextmanager
def treat_as_known(numbers: Callable[[Tensor], bool]) -> Iterator[None]:
    """Has the library treat traced tensors whose `numbers` are known as ordinary ones, as for masks it can omit."""
    from transformers.utils import import_utils

    original = import_utils.is_fake_tensor
    import_utils.is_fake_tensor = lambda x: original(x) and not numbers(x)
    try:
        yield
    finally:
        import_utils.is_fake_tensor = original


def _plain(model: Any, pad: int | None) -> None:
    """Makes the model take only its input and return only its logits. Its class gets a name of its own."""
    kind = type(model)
    forward, name = kind.forward, model.main_input_name
    if pad is not None and "attention_mask" not in inspect.signature(forward).parameters:
        raise TransformersError(f"`{kind.__name__}` takes no attention mask, which `data.pad` asks for")

    def logits(self: nn.Module, input: Tensor, **keywords: Tensor) -> Tensor:
        mask = {} if pad is None else {"attention_mask": (input != pad).long()}
        scores: Tensor = forward(self, **{name: input}, **mask, **keywords).logits
        return scores

    def with_positions(self: nn.Module, input: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return logits(self, input) if position_ids is None else logits(self, input, position_ids=position_ids)

    wrapped = with_positions if "position_ids" in inspect.signature(forward).parameters else logits
    model.__class__ = type(kind.__name__, (kind,), {"forward": wrapped, "__module__": kind.__module__})


# ------------------------------------------------------------------------------------------------- configuration


def _config(step: TransformersStep) -> tuple[Any, str]:
    """Returns the configuration, and the kind of model made of it."""
    let_torchvision_load()
    from transformers import CONFIG_MAPPING

    configuration = _file(step)
    if configuration is None and step.name not in CONFIG_MAPPING:
        suggestions = difflib.get_close_matches(step.name.lower(), list(CONFIG_MAPPING), 1)
        hint = (
            f"did you mean `{suggestions[0]}`?"
            if suggestions
            else "it is a folder with a `config.json`, such a file, or a type"
        )
        raise TransformersError(f"there is no `{step.name}`, neither a file nor a type of transformers; {hint}")
    configuration = configuration or {}
    model_type = configuration.get("model_type", step.name)
    if model_type not in CONFIG_MAPPING:
        raise TransformersError(f"the installed transformers knows no model type `{model_type}`")
    kind = CONFIG_MAPPING[model_type]
    alias = dict(kind.attribute_map)
    values = {alias.get(name, name): value for name, value in configuration.items() if name not in _OF_THE_FILE}
    arguments = {alias.get(n, n): list(v) if isinstance(v, tuple) else v for n, v in step.arguments.items()}
    if step.kind.endswith("classification") and step.labels and not {"num_labels", "id2label"} & values.keys():
        values["num_labels"] = step.labels
    if step.pad is not None:
        values["pad_token_id"] = step.pad  # a classifier finds the last token of a sequence by it
    if "num_labels" in arguments:
        values.pop("id2label", None)
        values.pop("label2id", None)
    _check_names(_make_config(kind, values), step)
    config = _make_config(kind, values | arguments)
    size = getattr(config, "vocab_size", None)
    if step.pad is not None and isinstance(size, int) and step.pad >= size:
        raise TransformersError(f"a vocabulary of {size} does not hold the padding, `data.pad = {step.pad}`")
    config.use_cache = False
    config.return_dict = True
    if not step.kind:
        raise TransformersError(
            "neither the job nor its file says what it is for; `task = sequence_classification`, for example, does"
        )
    return config, step.kind


def _make_config(kind: Callable[..., Any], values: dict[str, Any]) -> Any:
    try:
        return kind(**values)
    except Exception as error:  # any kind, as above
        raise TransformersError(f"the configuration cannot be made: {_line(error)}") from error


def _check_names(config: Any, step: TransformersStep) -> None:
    allowed = {*config.to_dict(), *config.attribute_map, "num_labels", "attn_implementation"}
    for name in step.arguments:
        if name not in allowed:
            suggestions = difflib.get_close_matches(name, [k for k in allowed if not k.startswith("_")], 1)
            suggestion_text = f"; did you mean `{suggestions[0]}`?" if suggestions else ""
            raise TransformersError(
                f"the configuration of `{config.model_type}` has no `{name}`{suggestion_text}", name
            )


def _file(step: TransformersStep) -> dict[str, Any] | None:
    """Returns the contents of a configuration file; None if the name is not one."""
    path = os.path.join(step.folder, os.path.expanduser(step.name))
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    elif not (path.endswith(".json") or os.sep in step.name or "/" in step.name):
        return None
    try:
        content = read_json(path, _CONFIGURATION_LIMIT)
    except FileNotFoundError:
        fetch = f"hf download {step.name} config.json --local-dir {os.path.basename(step.name)}"
        raise TransformersError(f"there is no {path}; nothing is fetched: `{fetch}` does it") from None
    except (OSError, ValueError) as error:
        raise TransformersError(f"{path} cannot be read as JSON: {_line(error)}") from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise TransformersError(f"{path} has no `model_type`, so it is not a configuration of transformers")
    return content


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().split("\n") if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences messages below the level of an error from a library and those it loads."""
    level_before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level_before)
