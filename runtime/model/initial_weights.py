"""Loads weights from files instead of initial values.

Model: the files hold tensors under the names of the unwrapped model's parameters and persistent buffers, or under names
that the job's renames bring there: `.safetensors` files, or files in which `torch.save` has put a state dict. Of a
sharded parameter a rank reads only its own part: safetensors files are read piece by piece, torch files are mapped into
memory.

Contract: names and shapes fit as compiler/facts/weights_match.py says, or a WeightsError names those that do not. A
tensor that the job lets the files lack keeps its initial value. Names are those without adapters, whose own tensors
are initial, unless the file has adapters itself. A tied weight is in the files once, or under several of
its names with the same values. Numbers are converted to the dtype of the model's tensor. Rank 0 tells what was left out
or kept its initial value: in short on the screen, whole in its log.

Limits: torch files are read with `weights_only=True`, so that nothing in them runs; one written before torch 1.6 cannot
be mapped and is read whole.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslc.compiler.facts.weights_match import ExpertStack, Shapes, WeightMatch, faults, fit, stack_experts
from dslc.compiler.ir.parameter_names import base_name, is_of_adapter, without_adapters
from dslc.compiler.ir.program import ModelStep, WeightsStep
from dslc.compiler.ir.tensors import QuantizedWeight
from dslc.compiler.trace.private_torch import part_in_whole
from dslc.runtime.model.row_order import runs_of_part
from dslc.runtime.model.tensor_names import named_tensors

Part = tuple[slice, ...]
Read = Callable[[str, Part], Tensor]
Tell = Callable[[str, str], None]  # takes a line for the screen, and the line with all names, for the log
_WRAPPINGS = ("state_dict", "model_state_dict", "model", "module")  # keys under which scripts keep the state dict
_DEPTH = 3  # of mappings within mappings where a state dict is looked for
_KEYS = 8  # of a file that a message names
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_ADVICE = re.compile("Weights only load failed|Please file an issue|Check the documentation")  # of torch
_START = 64  # bytes of a file that a message may show
_SAVE_ALONE = "save the state dict alone, as in `torch.save(model.state_dict(), …)`"
_SHOWN = 3  # names that a line on the screen has


class WeightsError(RuntimeError):
    """A file of weights cannot be read or does not fit; the message begins with the line of the job."""


@torch.no_grad()
def load(
    step: ModelStep,
    model: nn.Module,
    unsharded: Mapping[str, Tensor] | None = None,
    tell: Tell = lambda line, unsharded: None,
) -> None:
    """Loads the values of `step.weights` into `model`, whose tensors may be sharded. Raises WeightsError.

    If `model` is a part of a model, `unsharded` are all its tensors by name. `tell` is given lines on tensors that are
    not loaded.
    """
    weights = step.weights
    if weights is None:
        return
    path = weights.path or weights.files[0]
    what = f"{weights.line}: {path}" if weights.line else path
    tensors, ties = named_tensors(model), dict(step.ties)
    shapes = {name: tuple(tensor.shape) for name, tensor in (unsharded or tensors).items()}
    with ExitStack() as open_files:
        stored_shapes, read_stored = _opened(weights, open_files, what)
        if step.adapter is not None and not any(map(is_of_adapter, stored_shapes)):
            tensors, shapes = without_adapters(tensors), without_adapters(shapes)
            ties = {base_name(name): base_name(whose) for name, whose in ties.items()}
        shapes_in_file, read_tensor = _with_stacks(stored_shapes, read_stored, shapes)
        quantized = {base_name(form.name): form for form in step.quantized}
        # A file that this training wrote has the bytes.
        quantized = {name: form for name, form in quantized.items() if shapes_in_file.get(name) != (form.bytes,)}
        shapes |= {name: form.shape for name, form in quantized.items() if name in shapes}
        fits = fit(
            shapes_in_file,
            shapes,
            ties,
            only=weights.only,
            rename=weights.rename,
            allow_missing=weights.allow_missing,
            allow_unused=weights.allow_unused,
        )
        if not fits.is_complete:
            sentences = (f"it {kind} {_some_names(names)}" for kind, names in faults(fits, shapes_in_file, shapes))
            raise WeightsError(f"{what} is not of this model: {'; '.join(sentences)}")
        _put(fits, _with_quantized(read_tensor, dict(fits.taken), quantized, what), tensors, what)
    if not dist.is_initialized() or dist.get_rank() == 0:
        _tell(fits, path, tell)


def _put(fits: WeightMatch, read_tensor: Read, tensors: Mapping[str, Tensor], what: str) -> None:
    for name, name_in_file in fits.taken:
        if name in tensors:
            for local, part in _runs(name, tensors[name]):
                local.copy_(read_tensor(name_in_file, part))
    for name, name_in_file in fits.copies:
        if name in tensors:
            for local, part in _runs(name, tensors[name]):
                if not torch.equal(local.cpu(), read_tensor(name_in_file, part).to(local.dtype)):
                    raise WeightsError(
                        f"{what}: `{name_in_file}` and `{name}` are one weight in the model, and differ here"
                    )


def _with_stacks(stored_shapes: Shapes, read_tensor: Read, wanted: Shapes) -> tuple[Shapes, Read]:
    """Returns the shapes with the experts' matrices stacked as the model has them, and a function that reads a part."""
    stacks = stack_experts(stored_shapes, wanted)
    pieces = {name for stack in stacks.values() for name in stack.names}
    rest = {name: shape for name, shape in stored_shapes.items() if name not in pieces}

    def read_part(name: str, part: Part) -> Tensor:
        return _read_stack(stacks[name], read_tensor, part) if name in stacks else read_tensor(name, part)

    return rest | {name: stack.shape for name, stack in stacks.items()}, read_part


def _read_stack(stack: ExpertStack, read_tensor: Read, part: Part) -> Tensor:
    if len(stack.shape) == 2:
        return read_tensor(stack.matrices[0][0], part)
    experts, rows, columns = part
    height = stack.shape[1] // len(stack.matrices[0])

    def read_expert(names: tuple[str, ...]) -> Tensor:
        blocks = []
        for number, name in enumerate(names):
            first, stop = max(0, rows.start - number * height), min(height, rows.stop - number * height)
            if first < stop:
                blocks.append(read_tensor(name, (slice(first, stop), columns)))
        return torch.cat(blocks)

    return torch.stack([read_expert(names) for names in stack.matrices[experts]])


def _with_quantized(
    read_tensor: Read, files: Mapping[str, str], quantized: Mapping[str, QuantizedWeight], what: str
) -> Read:
    """Returns a function that reads a part of the bytes of a quantized weight, and else what `read_tensor` reads. The
    scalers of a weight depend on all of it, so a rank reads all of it, and keeps its part.
    """
    forms = {files[name]: form for name, form in quantized.items() if name in files}
    if not forms:
        return read_tensor
    from dslc.runtime.model.quantized_linear import QuantizationError, quantize

    def read_quantized(name: str, part: Part) -> Tensor:
        form = forms.get(name)
        if form is None:
            return read_tensor(name, part)
        try:
            return quantize(read_tensor(name, tuple(slice(0, size) for size in form.shape)), form)[part]
        except QuantizationError as error:
            raise WeightsError(f"{what}: {error}") from error

    return read_quantized


def _runs(name: str, tensor: Tensor) -> Iterator[tuple[Tensor, Part]]:
    """Yields what this rank has of a tensor, each with its place in the whole."""
    local, part = own_part(tensor)
    if 0 in local.shape:
        return
    for own_run, run in runs_of_part(name, part):
        yield local[own_run], run


def _tell(fits: WeightMatch, path: str, tell: Tell) -> None:
    """Tells of the tensors that were not loaded."""
    count = len(fits.initial) + len(fits.taken)
    initial = f"{len(fits.initial)} of {count} tensors keep their initial values"
    left_out = f"{len(fits.left_out)} tensors of {path} are left out"
    for what, names in ((initial, fits.initial), (left_out, fits.left_out)):
        if names:
            tell(*(f"weights: {what}: {_some_names(list(names), most)}" for most in (_SHOWN, len(names))))


def _some_names(names: list[str], count: int = _SHOWN) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def own_part(tensor: Tensor) -> tuple[Tensor, Part]:
    """Returns this rank's part of `tensor`, and its place in the whole."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach(), part_of(tensor)


def part_of(tensor: Tensor) -> Part:
    """Returns the place in the whole of this rank's part of `tensor`."""
    if not hasattr(tensor, "placements"):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = part_in_whole(tensor)
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


# ---------------------------------------------------------------------------------------------------------- files


def _opened(weights: WeightsStep, open_files: ExitStack, what: str) -> tuple[Shapes, Read]:
    """Returns the shapes of the tensors in all files, and a function that reads a part of one. Raises WeightsError."""
    shapes: dict[str, tuple[int, ...]] = {}
    readers: dict[str, Read] = {}
    for file in weights.files:
        try:
            shapes_in_file, read_tensor = (_safetensors if file.endswith(".safetensors") else _torch)(file, open_files)
        except Exception as error:  # unpickling and two libraries have errors of their own
            place = what if len(weights.files) == 1 else f"{what}: {file}"
            raise WeightsError(f"{place} cannot be read as weights: {error}") from error
        twice = next((name for name in shapes_in_file if name in shapes), None)
        if twice is not None:
            raise WeightsError(f"{what}: two of its files hold `{twice}`")
        shapes |= shapes_in_file
        readers |= dict.fromkeys(shapes_in_file, read_tensor)
    return shapes, lambda name, part: readers[name](name, part)


def _safetensors(path: str, open_files: ExitStack) -> tuple[dict[str, tuple[int, ...]], Read]:
    from safetensors import safe_open

    file: Any = open_files.enter_context(safe_open(path, framework="pt", device="cpu"))
    shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping

    def read_part(name: str, part: Part) -> Tensor:
        tensor: Tensor = file.get_slice(name)[part] if part else file.get_tensor(name)
        return tensor

    return shapes, read_part


def _torch(path: str, open_files: ExitStack) -> tuple[dict[str, tuple[int, ...]], Read]:
    tensors = tensors_of(path)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}, lambda name, part: tensors[name][part]


def tensors_of(path: str) -> dict[str, Tensor]:
    """Returns the tensors of a state dict in a file, mapped. Raises as torch does; ValueError unless there is one."""
    try:
        return state_dict_in(_load_file(path))
    except (pickle.UnpicklingError, EOFError) as error:
        raise ValueError(_refusal_reason(path, str(error))) from error
    except RuntimeError as error:
        if "TorchScript" not in str(error):
            raise
        raise ValueError(f"it is an archive of TorchScript: {_SAVE_ALONE}") from error


def _load_file(path: str) -> object:
    """Returns what `torch.save` wrote, mapped into memory where torch can; nothing in it runs."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*TorchScript archive", UserWarning)  # it is refused
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        return torch.load(path, map_location="cpu", weights_only=True)


def _refusal_reason(path: str, error: str) -> str:
    """Returns why `weights_only` refuses a file; torch's advice, to read it all the same, is left out."""
    match = re.search(r"(?i)unsupported (?:global: )?GLOBAL (\S+)", error)
    if match is not None:
        return f"it holds an object of `{match[1]}`, which may run code: {_SAVE_ALONE}"
    with open(path, "rb") as file:
        start = file.read(_START)
    if start.startswith(b"version https://git-lfs"):
        return "it is a pointer of Git LFS, which `git lfs pull` replaces by the file"
    if not start:
        return "it is empty"
    if start.isascii() and start.decode().isprintable():
        return f"`torch.save` has not written it: it begins with `{start.decode()}`"
    lines = _ESCAPES.sub("", error).splitlines()
    reasons = [line.strip() for line in lines if line.strip() and not _ADVICE.match(line)]
    return f"torch cannot read it without running what it holds ({reasons[0] if reasons else 'no reason given'})"


def state_dict_in(file_content: object) -> dict[str, Tensor]:
    """Returns the tensors of the one state dict in what `torch.load` gives, however deep; else raises ValueError."""
    for key in _WRAPPINGS:
        if isinstance(file_content, Mapping) and isinstance(file_content.get(key), Mapping):
            file_content = file_content[key]
    state_dicts = dict(_state_dicts(file_content))
    with_weights = {
        path: state_dict for path, state_dict in state_dicts.items() if any(map(_may_be_weight, _tensors(state_dict)))
    }
    state_dicts = with_weights or state_dicts
    if len(state_dicts) != 1:
        keys = list(state_dicts) or (list(map(str, file_content)) if isinstance(file_content, Mapping) else [])
        named = _some_names([f"`{key}`" for key in keys], _KEYS)
        if state_dicts:
            raise ValueError(f"it holds {len(state_dicts)} state dicts, {named}: save the network's own alone")
        what = f"its keys are {named}" if keys else f"it is a {type(file_content).__name__}"
        raise ValueError(f"it holds no state dict: {what}")
    (tensors,) = state_dicts.values()
    return {name: value for name, value in tensors.items() if isinstance(value, Tensor)}


def _tensors(state: Mapping[str, object]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]


def _state_dicts(file_content: object, path: str = "") -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yields mappings of names to tensors by path, outermost first; not optimizers' states, nor single numbers."""
    if not isinstance(file_content, Mapping) or not all(isinstance(key, str) for key in file_content):
        return
    inner = [(key, value) for key, value in file_content.items() if isinstance(value, Mapping)]
    tensors = _tensors(file_content)
    if any(map(_may_be_weight, tensors)) or (tensors and not inner):
        yield path, file_content
    elif path.count(".") < _DEPTH:
        for key, value in inner:
            yield from _state_dicts(value, f"{path}.{key}" if path else key)


def _may_be_weight(tensor: Tensor) -> bool:
    """True for tensors of more than one number that are no state of a random generator, which is bytes."""
    return tensor.dim() > 0 and tensor.dtype != torch.uint8
