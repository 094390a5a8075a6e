"""Exports the whole weights of a checkpoint to a file that torch reads without dslc, or to a folder for `transformers`.

Model: a checkpoint of any plan holds each tensor of the model under `model.<name>` (state.py), in pieces; one tensor
after another is put together and written. `.safetensors` is written directly. `.pt`, which torch writes from a state
dict, is made from such a file, which the safetensors library maps into memory.

Contract: one process, no launch, one tensor in memory at a time. Names are those of the unwrapped model. A tied weight
stands in a `.safetensors` file once, as the format requires, and in a `.pt` under each of its names, so that
`load_state_dict` takes it. The file is written beside its place and renamed, and so is a folder, which
`from_pretrained` takes: a configuration, and `.safetensors` files with an index, as `save_pretrained` writes them.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dslc.runtime.checkpoint.files import misfitting_tensors
from dslc.runtime.checkpoint.state import CheckpointError, key_of, keys_of, read
from dslc.runtime.checkpoint.tensor_file import writing
from dslc.runtime.checkpoint.weights import METADATA, entry, write_tensor

if TYPE_CHECKING:
    from dslc.compiler.ir.program import TransformersStep

SUFFIXES = (".safetensors", ".pt")
SHARD = 50 * 10**9  # bytes of a file in a folder, at most: that of `save_pretrained`
_WEIGHTS = "model.safetensors"  # in a folder


def export(source: str, ties: Mapping[str, str], path: str, *, raw: bool = False) -> int:
    """Writes the weights of `source`, a checkpoint or a `.safetensors` file, to `path`; returns the number of tensors.
    Of a checkpoint with an average of the weights that is written, but with `raw` the weights themselves.

    `ties` maps a parameter to the one whose tensor it is. Raises CheckpointError and OSError.
    """
    plain = path + ".plain"
    try:
        if os.path.isdir(source):
            with _opened(source, raw) as (found, fetch):
                _write(found, fetch, plain)
        else:
            shutil.copyfile(source, plain)
        tensors = _mapped(plain, source)
        if path.endswith(".safetensors"):
            os.replace(plain, path)
            return len(tensors)
        state = tensors | {name: tensors[whose] for name, whose in ties.items() if whose in tensors}
        torch.save(state, path + ".saved")
        os.replace(path + ".saved", path)
        return len(state)
    finally:
        if os.path.exists(plain):
            os.remove(plain)


def export_folder(source: str, step: TransformersStep, folder: str, most: int = SHARD, *, raw: bool = False) -> int:
    """Writes the model of `step`, with the weights of `source`, to `folder`, which does not exist or is empty, in files
    of at most `most` bytes (one tensor may have more); returns the number of tensors. `raw` is as for `export`.

    Files of the tokenizer are copied from the folder of the model's configuration. Raises CheckpointError, OSError and
    ModelError.
    """
    from dslc.runtime.model.transformers_model import save_configuration

    made = tempfile.mkdtemp(prefix=f".{os.path.basename(folder)}-", dir=os.path.dirname(os.path.abspath(folder)))
    try:
        wanted = save_configuration(step, made)
        with _opened(source, raw) as (tensors, fetch):
            wrong = misfitting_tensors({name: tuple(tensor.shape) for name, tensor in tensors.items()}, wanted)
            if wrong:
                raise CheckpointError(f"{source} is not of this model: {wrong}")
            shards = _shards({name: tensors[name] for name in wanted}, most)
            files = {
                _WEIGHTS if len(shards) == 1 else f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard
                for n, shard in enumerate(shards, 1)
            }
            for file, shard in files.items():
                _write(shard, fetch, os.path.join(made, file))
        if len(files) > 1:
            whole = [tensor for shard in shards for tensor in shard.values()]
            told = {"total_size": sum(map(_bytes, whole)), "total_parameters": sum(t.numel() for t in whole)}
            places = {name: file for file, shard in files.items() for name in shard}
            with open(os.path.join(made, f"{_WEIGHTS}.index.json"), "w", encoding="utf-8") as index:
                json.dump({"metadata": told, "weight_map": dict(sorted(places.items()))}, index, indent=2)
        os.chmod(made, 0o777 & ~_umask())
        os.replace(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return len(wanted)


def _umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _shards(tensors: Mapping[str, Tensor], most: int) -> list[dict[str, Tensor]]:
    """Shares tensors out over files of at most `most` bytes, in their order."""
    found: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if found[-1] and sum(map(_bytes, found[-1].values())) + _bytes(tensor) > most:
            found.append({})
        found[-1][name] = tensor
    return found


@contextmanager
def _opened(source: str, raw: bool) -> Iterator[tuple[dict[str, Tensor], Callable[[str], Tensor]]]:
    """Yields the tensors of a checkpoint or a safetensors file, of which only shape and dtype count, and a function
    that reads one. Raises CheckpointError.
    """
    if os.path.isdir(source):
        kept = {key.removeprefix("model."): at for key, at in keys_of(source).items() if key.startswith("model.")}
        taken = key_of(source, raw)
        blank = {name: torch.empty(at.size, dtype=at.properties.dtype, device="meta") for name, at in kept.items()}

        def whole(name: str) -> Tensor:
            made = torch.empty(blank[name].shape, dtype=blank[name].dtype)
            read(source, {taken(name): made})
            return made

        yield blank, whole
        return
    mapped = _mapped(source, source)
    yield mapped, mapped.__getitem__


def _write(tensors: Mapping[str, Tensor], fetch: Callable[[str], Tensor], path: str) -> None:
    with writing(path, {name: entry(tensor) for name, tensor in tensors.items()}, METADATA) as file:
        for name in tensors:
            write_tensor(file, fetch(name))


def _mapped(path: str, source: str) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file made of `source`, each with a storage of its own, in the order of their
    bytes."""
    from safetensors import SafetensorError, safe_open

    try:
        opened: Any = safe_open(path, framework="pt", device="cpu")
        with opened as file:
            tensors = {name: file.get_tensor(name) for name in file.offset_keys()}
    except SafetensorError as error:
        raise CheckpointError(f"{source} cannot be read as safetensors: {error}") from error
    # An empty one lies where the next begins, and torch saves no two that begin at one place and are of unequal dtypes.
    return {name: tensor if tensor.numel() else torch.empty_like(tensor) for name, tensor in tensors.items()}
