"""Exports the whole weights of a checkpoint to a file that torch reads without dslc, or to a folder for `transformers`.

Model: a checkpoint of any plan holds each tensor of the model under `model.<name>` (state.py), in pieces; one tensor
after another is put together and written. `.safetensors` is written directly. torch writes `.pt` from a state dict,
whose tensors the safetensors library maps into memory from such a file.

Of a network with adapters the weights are merged: each layer has its own name, and its weight the change of its
adapter, as peft's `merge_and_unload` gives it. `export_adapter` writes what was trained alone, for peft.

Contract: one process, no launch, one tensor in memory at a time. The names are the names in the unwrapped model. A
`.safetensors` file has a tied weight once, as the format requires; a `.pt` has it under each of its names, so that
`load_state_dict` takes it. The file is written beside its place and renamed, and so is a folder, which
`from_pretrained` takes, as `save_pretrained` writes it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dslc.compiler.ir.parameter_names import BASE, FIRST, SECOND, file_name, is_of_adapter, targeted, without_adapters
from dslc.runtime.checkpoint.files import misfitting_tensors
from dslc.runtime.checkpoint.state import CheckpointError, key_of, keys_of, read_tensors
from dslc.runtime.checkpoint.tensor_file import writing
from dslc.runtime.checkpoint.weights import METADATA, entry, write_tensor
from dslc.runtime.model import adapters

if TYPE_CHECKING:
    from dslc.compiler.ir.program import AdapterStep, TransformersStep

SUFFIXES = (".safetensors", ".pt")
SHARD = 50 * 10**9  # bytes of a file in a folder, at most: that of `save_pretrained`
_WEIGHTS = "model.safetensors"  # in a folder


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """A network's adapter. `transposed`: layers whose weight has the input's dim first; None if they are unknown."""

    step: AdapterStep
    transposed: frozenset[str] | None


def export(
    source: str, ties: Mapping[str, str], path: str, *, raw: bool = False, adapted: Adapted | None = None
) -> int:
    """Writes the weights of `source`, a checkpoint or a `.safetensors` file, to `path`; returns the number of tensors.
    `ties` maps a parameter to the one whose tensor it is. Of a checkpoint with an average of the weights that is
    written, but with `raw` the weights themselves. Raises CheckpointError and OSError.
    """
    plain = path + ".plain"
    try:
        if os.path.isdir(source) or adapted is not None:
            with _opened(source, raw, adapted) as (found, fetch):
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


def export_adapter(
    source: str,
    adapted: Adapted,
    folder: str,
    *,
    base: str = "",
    kind: str = "",
    raw: bool = False,
    ties: Mapping[str, str] | None = None,
) -> int:
    """Writes the adapter in `source` alone, with the modules that train whole, to `folder`, which is empty or not
    there, as peft's `from_pretrained` takes it. Returns the number of tensors. `base` and `kind` are as for
    `adapters.save_configuration`. A tied weight that trains stands under each of its names, of `ties`: peft makes a
    copy of each module to save. Raises CheckpointError and OSError.
    """
    saved = targeted(adapted.step.save)

    def trained(name: str) -> bool:
        parts = name.split(".")
        return is_of_adapter(name) or any(saved(".".join(parts[:n])) for n in range(1, len(parts)))

    with _new_folder(folder) as made, _opened(source, raw) as (found, fetch):
        named = {name: name for name in found} | {name: first for name, first in (ties or {}).items() if first in found}
        kept = {adapters.PREFIX + file_name(name): first for name, first in named.items() if trained(name)}
        layers = [name.removesuffix(f".{FIRST}.weight") for name in found if name.endswith(f".{FIRST}.weight")]
        if not layers:
            raise CheckpointError(f"{source} has no adapter")
        adapters.save_configuration(adapted.step, layers, base, kind, made)
        tensors = {there: found[name] for there, name in kept.items()}
        _write(tensors, lambda there: fetch(kept[there]), os.path.join(made, adapters.WEIGHTS))
    return len(kept)


def export_folder(
    source: str,
    step: TransformersStep,
    folder: str,
    most: int = SHARD,
    *,
    raw: bool = False,
    adapted: Adapted | None = None,
) -> int:
    """Writes the model of `step`, with the weights of `source` and the files of its tokenizer, to `folder`, which is
    empty or not there, in files of at most `most` bytes (one tensor may have more). Returns the number of tensors.
    `raw` is as for `export`. Raises CheckpointError, OSError and ModelError.
    """
    from dslc.runtime.model.transformers_model import save_configuration

    with _new_folder(folder) as made:
        wanted = save_configuration(step, made)
        with _opened(source, raw, adapted) as (tensors, fetch):
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
    return len(wanted)


@contextmanager
def _new_folder(folder: str) -> Iterator[str]:
    """Yields a folder that becomes `folder` at the end, unless an exception ends it."""
    made = tempfile.mkdtemp(prefix=f".{os.path.basename(folder)}-", dir=os.path.dirname(os.path.abspath(folder)))
    try:
        yield made
        os.chmod(made, 0o777 & ~_umask())
        os.replace(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


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


Fetch = Callable[[str], Tensor]


@contextmanager
def _opened(source: str, raw: bool, adapted: Adapted | None = None) -> Iterator[tuple[dict[str, Tensor], Fetch]]:
    """Yields what `_opened_plain` does, with the adapters merged into their layers."""
    with _opened_plain(source, raw) as (found, fetch):
        if adapted is None:
            yield found, fetch
        else:
            yield without_adapters(found), partial(_merged, adapted, found, fetch)


def _merged(adapted: Adapted, found: Mapping[str, Tensor], fetch: Fetch, name: str) -> Tensor:
    """Returns a tensor by its name without adapters. Raises CheckpointError."""
    layer, _, last = name.rpartition(".")
    inner = f"{layer}.{BASE}.{last}"
    if inner not in found:
        return fetch(name)
    if last != "weight":
        return fetch(inner)
    first, second = fetch(f"{layer}.{FIRST}.weight"), fetch(f"{layer}.{SECOND}.weight")
    rows, columns = second.shape[0], first.shape[1]
    if adapted.transposed is None and rows == columns:
        raise CheckpointError(
            f"how `{layer}` keeps its weight is not known, as the network cannot be made without data"
        )
    over = tuple(found[inner].shape) != (rows, columns) if adapted.transposed is None else layer in adapted.transposed
    return adapters.merge(fetch(inner), first, second, adapted.step, transposed=over)


@contextmanager
def _opened_plain(source: str, raw: bool) -> Iterator[tuple[dict[str, Tensor], Fetch]]:
    """Yields the tensors of a checkpoint or a safetensors file, of which shapes and dtypes count, and a function that
    reads one. Raises CheckpointError.
    """
    if os.path.isdir(source):
        kept = {key.removeprefix("model."): at for key, at in keys_of(source).items() if key.startswith("model.")}
        taken = key_of(source, raw)
        blank = {name: torch.empty(at.size, dtype=at.properties.dtype, device="meta") for name, at in kept.items()}

        def load_full(name: str) -> Tensor:
            made = torch.empty(blank[name].shape, dtype=blank[name].dtype)
            read_tensors(source, {taken(name): made})
            return made

        yield blank, load_full
        return
    mapped = _mapped(source, source)
    yield mapped, mapped.__getitem__


def _write(tensors: Mapping[str, Tensor], fetch: Callable[[str], Tensor], path: str) -> None:
    with writing(path, {name: entry(tensor) for name, tensor in tensors.items()}, METADATA) as file:
        for name in tensors:
            write_tensor(file, fetch(name))


def _mapped(path: str, source: str) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file made of `source`, each with a storage of its own, in the order of their
    bytes.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.offset_keys()}
    except SafetensorError as error:
        raise CheckpointError(f"{source} cannot be read as safetensors: {error}") from error
    # An empty one lies where the next begins, and torch saves no two that begin at one place and are of unequal dtypes.
    return {name: tensor if tensor.numel() else torch.empty_like(tensor) for name, tensor in tensors.items()}
