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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dslc.compiler.facts.untrusted_files import reveal_os_error
from dslc.compiler.ir.parameter_names import (
    BASE,
    FIRST,
    SECOND,
    adapted_stack,
    base_name,
    file_name,
    is_of_adapter,
    layers_with,
    targeted,
    without_adapters,
)
from dslc.runtime.checkpoint.companion_files import CompanionFiles
from dslc.runtime.checkpoint.files import misfitting_tensors
from dslc.runtime.checkpoint.state import CheckpointError, key_of, keys_of, read_tensors
from dslc.runtime.checkpoint.tensor_file import writing
from dslc.runtime.checkpoint.weights import METADATA, entry, write_tensor
from dslc.runtime.model import adapters

if TYPE_CHECKING:
    from dslc.compiler.ir.program import AdapterStep, TransformersStep
    from dslc.compiler.ir.tensors import QuantizedWeight

SUFFIXES = (".safetensors", ".pt")
SHARD = 50 * 10**9  # bytes of a file in a folder, at most: that of `save_pretrained`
_WEIGHTS = "model.safetensors"  # in a folder


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """A network's adapter. `transposed`: layers whose weight has the input's dim first; None if they are unknown.
    `quantized`: the weights in 4 or 8 bits, by their names.
    """

    step: AdapterStep
    transposed: frozenset[str] | None
    quantized: Mapping[str, QuantizedWeight] = field(default_factory=dict)


def export(
    source: str, ties: Mapping[str, str], path: str, *, raw: bool = False, adapter_weights: Adapted | None = None
) -> int:
    """Writes the weights of `source`, a checkpoint or a `.safetensors` file, to `path`; returns the number of tensors.
    `ties` maps a parameter to the one whose tensor it is. Of a checkpoint with an average of the weights that is
    written, but with `raw` the weights themselves. Raises CheckpointError and OSError.
    """
    plain, saved = path + ".plain", path + ".saved"
    try:
        if os.path.isdir(source) or adapter_weights is not None:
            with _opened(source, raw, adapter_weights) as (stored_tensors, fetch):
                _write(stored_tensors, fetch, plain)
        else:
            shutil.copyfile(source, plain)
        tensors = _mapped(plain, source)
        if path.endswith(".safetensors"):
            os.replace(plain, path)
            return len(tensors)
        state = tensors | {name: tensors[owner] for name, owner in ties.items() if owner in tensors}
        with open(saved, "wb") as file, reveal_os_error():
            torch.save(state, file)
        os.replace(saved, path)
        return len(state)
    finally:
        for part in filter(os.path.exists, (plain, saved)):
            os.remove(part)


def export_adapter(
    source: str,
    adapter_weights: Adapted,
    folder: str,
    *,
    base: str = "",
    kind: str = "",
    raw: bool = False,
    ties: Mapping[str, str] | None = None,
    companions: CompanionFiles | None = None,
) -> int:
    """Writes the adapter in `source` alone, with the modules that train whole, to `folder`, which is empty or not
    there, as peft's `from_pretrained` takes it. Returns the number of tensors. `base` and `kind` are as for
    `adapters.save_configuration`. A tied weight that trains stands under each of its names, of `ties`: peft makes a
    copy of each module to save. Raises CheckpointError and OSError.
    """
    is_saved_module = targeted(adapter_weights.step.save)

    def trained(name: str) -> bool:
        parts = name.split(".")
        return is_of_adapter(name) or any(is_saved_module(".".join(parts[:n])) for n in range(1, len(parts)))

    with _new_folder(folder) as new_folder, _opened(source, raw) as (stored_tensors, fetch):
        names = {name: name for name in stored_tensors} | {
            name: stored_name for name, stored_name in (ties or {}).items() if stored_name in stored_tensors
        }
        source_names = {
            adapters.PREFIX + file_name(name): stored_name for name, stored_name in names.items() if trained(name)
        }
        stacks = _adapted(stored_tensors)
        if not stacks:
            raise CheckpointError(f"{source} has no adapter")
        layers = [layer for layer, stack in stacks.items() if stack is None]
        stack_names = [base_name(stack) for stack in stacks.values() if stack is not None]
        adapters.save_configuration(adapter_weights.step, layers, stack_names, base, kind, new_folder)
        if companions is not None:
            companions.write(new_folder)
        tensors = {exported_name: stored_tensors[name] for exported_name, name in source_names.items()}
        _write(
            tensors,
            lambda exported_name: fetch(source_names[exported_name]),
            os.path.join(new_folder, adapters.WEIGHTS),
        )
    return len(source_names)


def export_folder(
    source: str,
    step: TransformersStep,
    folder: str,
    limit: int = SHARD,
    *,
    raw: bool = False,
    adapter_weights: Adapted | None = None,
    companions: CompanionFiles | None = None,
) -> int:
    """Writes the model of `step`, with the weights of `source`, to `folder`, which is empty or does not exist.

    Its files have at most `limit` bytes (one tensor may have more). Returns the number of tensors. `raw` is as for
    `export`. Raises CheckpointError, OSError and ModelError.
    """
    from dslc.runtime.model.transformers_model import save_configuration

    with _new_folder(folder) as new_folder:
        expected = save_configuration(step, new_folder)
        if companions is not None:
            companions.write(new_folder)
        with _opened(source, raw, adapter_weights) as (tensors, fetch):
            fault = misfitting_tensors({name: tuple(tensor.shape) for name, tensor in tensors.items()}, expected)
            if fault:
                raise CheckpointError(f"{source} is not of this model: {fault}")
            shards = _shards({name: tensors[name] for name in expected}, limit)
            files = {
                _WEIGHTS if len(shards) == 1 else f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard
                for n, shard in enumerate(shards, 1)
            }
            for file, shard in files.items():
                _write(shard, fetch, os.path.join(new_folder, file))
        if len(files) > 1:
            all_tensors = [tensor for shard in shards for tensor in shard.values()]
            metadata = {
                "total_size": sum(map(_bytes, all_tensors)),
                "total_parameters": sum(t.numel() for t in all_tensors),
            }
            places = {name: file for file, shard in files.items() for name in shard}
            with open(os.path.join(new_folder, f"{_WEIGHTS}.index.json"), "w", encoding="utf-8") as index:
                json.dump({"metadata": metadata, "weight_map": dict(sorted(places.items()))}, index, indent=2)
    return len(expected)


@contextmanager
def _new_folder(folder: str) -> Iterator[str]:
    """Yields a folder that becomes `folder` at the end, unless an exception ends it."""
    temporary = tempfile.mkdtemp(prefix=f".{os.path.basename(folder)}-", dir=os.path.dirname(os.path.abspath(folder)))
    try:
        yield temporary
        os.chmod(temporary, 0o777 & ~_umask())
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _shards(tensors: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """Shares tensors out over files of at most `limit` bytes, in their order."""
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(map(_bytes, shards[-1].values())) + _bytes(tensor) > limit:
            shards.append({})
        shards[-1][name] = tensor
    return shards


Fetch = Callable[[str], Tensor]


@contextmanager
def _opened(
    source: str, raw: bool, adapter_weights: Adapted | None = None
) -> Iterator[tuple[dict[str, Tensor], Fetch]]:
    """Yields what `_opened_plain` does, with the adapters merged into their layers."""
    with _opened_plain(source, raw) as (stored_tensors, fetch):
        if adapter_weights is None:
            yield stored_tensors, fetch
        else:
            stored_tensors, fetch = _dequantized(adapter_weights, stored_tensors, fetch)
            yield without_adapters(stored_tensors), _merged(adapter_weights, stored_tensors, fetch)


def _dequantized(
    adapter_weights: Adapted, stored_tensors: dict[str, Tensor], fetch: Fetch
) -> tuple[dict[str, Tensor], Fetch]:
    """Returns the tensors with weights in 4 or 8 bits in float32, in the shape of files, and how to read one."""
    forms = adapter_weights.quantized
    if not forms:
        return stored_tensors, fetch
    from dslc.runtime.model.quantized_linear import dequantize

    shapes = {
        name: torch.empty(forms[name].shape, dtype=torch.float32, device="meta") if name in forms else tensor
        for name, tensor in stored_tensors.items()
    }
    return shapes, lambda name: dequantize(fetch(name), forms[name]) if name in forms else fetch(name)


def _adapted(stored_tensors: Mapping[str, Tensor]) -> dict[str, str | None]:
    """Returns the layers with an adapter, each with the stored name of the stack of experts that it changes, or None
    for a dense layer.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in stored_tensors.items()}
    return {layer: adapted_stack(layer, shapes) for layer in layers_with(stored_tensors)}


def _merged(adapter_weights: Adapted, stored_tensors: Mapping[str, Tensor], fetch: Fetch) -> Fetch:
    """Returns the function that reads a tensor by its name without adapters. Raises CheckpointError."""
    stored_names = {base_name(name): name for name in stored_tensors if not is_of_adapter(name)}
    changed = {stack or f"{layer}.{BASE}.weight": (layer, stack) for layer, stack in _adapted(stored_tensors).items()}

    def fetch_merged(name: str) -> Tensor:
        stored_name = stored_names[name]
        if stored_name not in changed:
            return fetch(stored_name)
        layer, stack = changed[stored_name]
        down, up = fetch(f"{layer}.{FIRST}.weight"), fetch(f"{layer}.{SECOND}.weight")
        if stack is not None:
            return adapters.merge_stack(fetch(stack), down, up, adapter_weights.step)
        rows, columns = up.shape[0], down.shape[1]
        if adapter_weights.transposed is None and rows == columns:
            raise CheckpointError(
                f"how `{layer}` keeps its weight is not known, as the network cannot be made without data"
            )
        is_transposed = (
            tuple(stored_tensors[stored_name].shape) != (rows, columns)
            if adapter_weights.transposed is None
            else layer in adapter_weights.transposed
        )
        return adapters.merge(fetch(stored_name), down, up, adapter_weights.step, transposed=is_transposed)

    return fetch_merged


@contextmanager
def _opened_plain(source: str, raw: bool) -> Iterator[tuple[dict[str, Tensor], Fetch]]:
    """Yields the shapes and dtypes of a checkpoint's or safetensors file's tensors, and a function that reads a tensor.
    Raises CheckpointError.
    """
    if os.path.isdir(source):
        entries = {
            key.removeprefix("model."): entry for key, entry in keys_of(source).items() if key.startswith("model.")
        }
        key = key_of(source, raw)
        blank = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            for name, entry in entries.items()
        }

        def load_full(name: str) -> Tensor:
            tensor = torch.empty(blank[name].shape, dtype=blank[name].dtype)
            read_tensors(source, {key(name): tensor})
            return tensor

        yield blank, load_full
        return
    tensors = _mapped(source, source)
    yield tensors, tensors.__getitem__


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
