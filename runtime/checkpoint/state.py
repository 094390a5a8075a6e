"""Saves and loads the state of a training, under names that no plan changes.

    model.<name>                parameters and persistent buffers of the plain model, a tied weight once
    average.<name>              what is evaluated in the place of `model.<name>`: its average, if the job asks for one,
                                or the optimizer's average
    optimizer.<name>.<state>    the optimizer's state of that parameter: exp_avg, momentum_buffer, step, …
    scaler.<number>             the state of the loss scaler
    rng.<rank>.<generator>      the state of a rank's random generators
    own.<rank>.…, exchange.…    of ranks whose weights differ, and of an exchange (exchange_state.py)
    hook.<rank>.<name>          the state of a user's hook (loop/hooks.py)

Model: parameters and optimizer state are plain tensors that every rank holds (DistributedDataParallel), parts of one
tensor (`fully_shard`), or held by one rank alone (ZeroRedundancyOptimizer). Plain tensors, and the copies of
`replicas`, are divided among the ranks, so that each is written once and every rank writes about as much. A load reads
the tensors that this rank needs, whatever the ranks held that wrote them. The names in the checkpoint decide which
optimizer state is made, so that it needs no step first.

Contract: `load` leaves model, average, optimizer and scaler as they were on the ranks that saved; an average that the
checkpoint lacks begins with the weights. Random generators continue
from their states if the number of ranks is the same; else each rank begins a new sequence, seeded by this step.

Limits: if copies differ (statistics of a batch norm that is not synchronised) rank 0's are kept, with which
DistributedDataParallel continues too. A plain tensor is taken to be the same on all ranks. Extra state that a user's
module keeps outside its tensors is not written.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslc.compiler.facts.untrusted_files import open_file, reveal_os_error
from dslc.compiler.trace.private_torch import local_part, spec_of
from dslc.runtime.checkpoint.custom_optimizer_state import OwnState
from dslc.runtime.checkpoint.exchange_state import ExchangeState
from dslc.runtime.checkpoint.files import METADATA, Manifest, Shapes, is_plain_name, misfitting_tensors
from dslc.runtime.checkpoint.permuted_rows import with_chunks
from dslc.runtime.model.tensor_names import named_tensors
from dslc.runtime.optimizer.local_parts import empty_by_rows
from dslc.runtime.parallel.custom_optimizer import OwnOptimizer
from dslc.runtime.process import random_numbers
from dslc.runtime.technique import offload
from dslc.runtime.transport import unpickling

if TYPE_CHECKING:
    from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, SavePlan, SavePlanner
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
    from torch.distributed.checkpoint.storage import WriteResult

    from dslc.runtime.pipeline.pipeline import Pipeline
    from dslc.runtime.step.assemble import TrainingComponents


State = dict[str, Tensor]
AVERAGE = "average."  # begins the name of a parameter's average


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read or used. The text is for the user."""


class StorageError(CheckpointError):
    """The storage takes no checkpoints: the second in a row could not be written."""

    lasting = True  # process/failure.py


def shapes_of(model: nn.Module) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}


@torch.no_grad()
def load_model(
    path: str, manifest: Manifest, model: nn.Module, pipeline: Pipeline | None = None, *, raw: bool = False
) -> None:
    """Loads the weights of the checkpoint at `path` into `model`, the plain one, in place: their average if it has one,
    but with `raw` the weights themselves. Its tensors may be whole or parts (`fully_shard`), on any number of
    processes; none waits for another. Raises CheckpointError if they do not fit or cannot be read.
    """
    shapes = shapes_of(model) if pipeline is None else {n: tuple(t.shape) for n, t in pipeline.whole.items()}
    fault = misfitting_tensors(manifest.fit.tensors, shapes)
    if fault:
        raise CheckpointError(f"{path} is not of this model: {fault}")
    key = key_of(path, raw)
    read_tensors(path, {key(name): tensor.detach() for name, tensor in named_tensors(model).items()})


def key_of(path: str, raw: bool) -> Callable[[str], str]:
    """Returns the function that gives the name in a checkpoint for a name of the model: of its average, or with `raw`
    of itself.
    """
    stored_keys = keys_of(path)
    return lambda name: f"{AVERAGE}{name}" if f"{AVERAGE}{name}" in stored_keys and not raw else f"model.{name}"


class ExtraState(Protocol):
    """Further state of a rank, by names of its own."""

    def tensors_to_save(self) -> State: ...

    def tensors_to_load(self, stored_tensors: Mapping[str, TensorStorageMetadata]) -> State:
        """Returns tensors to read into, given the names in a checkpoint with the shape of each."""

    def after_load(self, tensors: State) -> None: ...


class TrainingState:
    """The parts of a training by name. To be made before the first step, while sharded parameters are in place.
    `counts` names the optimizer's states of one number, `group_state` entries of the groups of a user's own
    (custom_optimizer_state.py). `noise` is the rank with whose random numbers this one draws
    (parallel/tensor_parallel.py), if not its own.
    """

    def __init__(
        self,
        parts: TrainingComponents,
        rank: int,
        ranks: int,
        *,
        counts: Sequence[str],
        group_state: Sequence[str] = (),
        noise: int | None = None,
        extra: ExtraState | None = None,
    ) -> None:
        self._beside = extra
        self._parts, self._rank, self._ranks, self._counts = parts, rank, ranks, counts
        self._noise = rank if noise is None else noise
        stages = parts.pipeline.coordinates if parts.pipeline is not None else 1
        # A pipeline coordinate is a run of ranks: this rank's place in it, and its size.
        self._alike = rank % (ranks // stages), ranks // stages
        # Kept, because a model that has just been evaluated may show whole parameters instead of its parts.
        self._model = named_tensors(parts.plain)
        self._parameters = {name for name, tensor in self._model.items() if isinstance(tensor, nn.Parameter)}
        names = {id(tensor): name for name, tensor in self._model.items()}
        inner = parts.optimizer.optim if _is_zero1(parts.optimizer) else parts.optimizer  # type: ignore[attr-defined]
        self._own = OwnState(inner, names, group_state) if isinstance(inner, OwnOptimizer) else None
        self._slots = tuple(_slots(parts.optimizer, names)) if self._own is None else ()
        self._averages = parts.average.tensors if parts.average is not None else {}
        self._dealt_out = not _is_zero1(parts.optimizer)
        self._apart = ExchangeState(parts.exchange, rank) if parts.exchange is not None else None

    @property
    def shapes(self) -> Shapes:
        tensors = self._parts.pipeline.whole if self._parts.pipeline is not None else self._model
        return {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def _owns(self, name: str) -> bool:
        return self._parts.pipeline is None or self._parts.pipeline.owns(name)

    # ---------------------------------------------------------------------------------------------------- saving

    @torch.no_grad()
    def mine(self) -> State:
        """Returns the tensors that this rank writes: the training's own tensors, not copies, unless they are a mean
        over ranks.
        """
        offload.settle(self._parts.optimizer)
        if self._parts.average is not None:
            self._parts.average.refresh()
        if self._apart is None:
            return self._tensors_to_write()
        all_tensors = self._all_tensors()
        with self._apart.of_all(all_tensors):
            tensors = self._tensors_to_write()
            if self._apart.differ:
                tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        return tensors | self._apart.rank_tensors(all_tensors)

    def _all_tensors(self) -> State:
        """Returns what this rank has of the model and the optimizer, under the names of a checkpoint."""
        tensors = {f"model.{name}": tensor.detach() for name, tensor in self._model.items()}
        for name, tensor in named_tensors(self._parts.plain).items():
            tensors[f"model.{name}"] = tensor.detach()
        for slot in self._slots:
            for state, value in slot.kept.get(slot.parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{slot.name}.{state}"] = value
        for piece in self._own.pieces() if self._own is not None else ():
            tensors[f"optimizer.{piece.parameter}.{piece.state}"] = piece.tensor
        return tensors

    def _tensors_to_write(self) -> State:
        deal, tensors = _Deal(*self._alike), State()
        for name, tensor in self._model.items():
            if name in self._parameters and self._owns(name) and deal.is_mine(tensor):
                tensors[f"model.{name}"] = tensor
        for name, tensor in self._averages.items():
            if self._owns(name) and deal.is_mine(tensor):
                tensors[f"{AVERAGE}{name}"] = tensor
        for parameter, state, value in self._owned_states():
            if not self._dealt_out or deal.is_mine(value):
                tensors[f"optimizer.{parameter}.{state}"] = value
        if self._alike[0] == 0:
            for name, tensor in named_tensors(self._parts.plain).items():
                if name not in self._parameters:
                    tensors[f"model.{name}"] = tensor
        if self._rank == 0:
            for name, number in self._parts.scaler.state_dict().items():
                tensors[f"scaler.{name}"] = torch.tensor(float(number), dtype=torch.float64)
        if self._beside is not None:
            tensors |= self._beside.tensors_to_save()
        generators = random_numbers.state(self._parts.device)
        return tensors | {f"rng.{self._rank}.{name}": value for name, value in generators.items()}

    def _owned_states(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yields the parameter, the name and the tensor of each state of the optimizer that this rank owns."""
        for slot in filter(lambda slot: self._owns(slot.name), self._slots):
            for state, value in slot.kept.get(slot.parameter, {}).items():
                if value is None:
                    continue  # a momentum before the first gradient
                assert isinstance(value, Tensor), f"{slot.name}: state {state} is a {type(value).__name__}"
                yield slot.name, state, value
        for piece in self._own.pieces() if self._own is not None else ():
            if self._owns(piece.parameter):
                yield piece.parameter, piece.state, piece.tensor

    # --------------------------------------------------------------------------------------------------- loading

    @torch.no_grad()
    def load(self, path: str, manifest: Manifest, seed: int) -> list[str]:
        """Loads the checkpoint at `path`, and returns the names of what begins anew of an exchange. Raises
        CheckpointError.
        """
        stored_tensors = keys_of(path)
        same_ranks, anew = manifest.world_size == self._ranks, list[str]()
        states = _optimizer_states(stored_tensors)
        keys = _Keys(self._apart, stored_tensors, same_ranks)
        tensors_to_read = self._weights_to_read(keys) | self._slots_to_read(keys, stored_tensors, states)

        def size(parameter: str, state: str) -> Sequence[int]:
            return tuple(stored_tensors[keys[f"optimizer.{parameter}.{state}"]].size)

        custom_pieces = self._own.make(states, size) if self._own is not None else []
        tensors_to_read |= {keys[f"optimizer.{piece.parameter}.{piece.state}"]: piece.tensor for piece in custom_pieces}
        numbers = self._parts.scaler.state_dict()
        of_scaler = {
            name: torch.zeros((), dtype=torch.float64) for name in numbers if f"scaler.{name}" in stored_tensors
        }
        tensors_to_read |= {f"scaler.{name}": tensor for name, tensor in of_scaler.items()}
        generator_prefix = f"rng.{self._noise}."  # ranks that compute the same go on alike, whatever they did before
        generators = {
            name: tensor
            for name, tensor in random_numbers.state(self._parts.device).items()
            if same_ranks and generator_prefix + name in stored_tensors
        }
        tensors_to_read |= {generator_prefix + name: tensor for name, tensor in generators.items()}
        stored_averages = {
            name: tensor for name, tensor in self._averages.items() if f"{AVERAGE}{name}" in stored_tensors
        }
        tensors_to_read |= {f"{AVERAGE}{name}": tensor for name, tensor in stored_averages.items()}
        extra_tensors = self._beside.tensors_to_load(stored_tensors) if self._beside is not None else {}
        if self._apart is not None:
            exchange_tensors, anew = self._apart.tensors_to_load(stored_tensors, same_ranks)
            tensors_to_read |= exchange_tensors
        read_tensors(path, tensors_to_read | extra_tensors)
        if self._parts.average is not None:
            self._parts.average.begin(self._averages.keys() - stored_averages.keys())
        for slot in self._slots:
            slot.copy_to_device()
        for piece in custom_pieces:
            if piece.taken is not None:
                piece.taken(piece.tensor)
        if self._beside is not None:
            self._beside.after_load(extra_tensors)
        if of_scaler:
            self._parts.scaler.load_state_dict({n: type(numbers[n])(float(t)) for n, t in of_scaler.items()})
        if same_ranks:
            random_numbers.restore(generators, self._parts.device)
        else:
            random_numbers.begin(seed, self._noise, manifest.step)
        if self._apart is not None:
            self._apart.after_load()
        return anew

    def _weights_to_read(self, keys: _Keys) -> State:
        current = named_tensors(self._parts.plain)
        return {
            keys[f"model.{name}"]: (tensor if name in self._parameters else current[name]).detach()
            for name, tensor in self._model.items()
        }

    def _slots_to_read(
        self, keys: _Keys, stored_tensors: Mapping[str, TensorStorageMetadata], states: Mapping[str, Collection[str]]
    ) -> State:
        """Makes the optimizer's states that a checkpoint has, and returns them."""
        made = State()
        for slot in self._slots:
            slot_tensors = {
                state: slot.make(state in self._counts, stored_tensors[keys[f"optimizer.{slot.name}.{state}"]])
                for state in states.get(slot.name, ())
            }
            made |= {keys[f"optimizer.{slot.name}.{state}"]: tensor for state, tensor in slot_tensors.items()}
            if slot_tensors:
                slot.kept[slot.parameter] = slot_tensors
        return made


def _optimizer_states(keys: Iterable[str]) -> dict[str, list[str]]:
    states: dict[str, list[str]] = {}
    for key in keys:
        name, _, state = key.removeprefix("optimizer.").rpartition(".")
        if key.startswith("optimizer."):
            states.setdefault(name, []).append(state)
    return states


class _Keys:
    def __init__(self, exchange_state: ExchangeState | None, stored_keys: Collection[str], same_ranks: bool) -> None:
        self._apart, self._there, self._same_ranks = exchange_state, stored_keys, same_ranks

    def __getitem__(self, name: str) -> str:
        return name if self._apart is None else self._apart.key(name, self._there, self._same_ranks)


# ----------------------------------------------------------------------------------------------- the optimizer's part


@dataclass(frozen=True, kw_only=True)
class _Slot:
    """One parameter, and the mapping in which an optimizer keeps its state."""

    name: str
    parameter: Tensor
    kept: MutableMapping[Tensor, Mapping[str, object]]
    step_beside: bool  # its states of one number are on the parameter's device, as fused kernels need them
    original: Tensor | None = None  # the parameter on the device, if this is the host's copy

    def make(self, one_number: bool, stored: TensorStorageMetadata) -> Tensor:
        """Returns an empty tensor for a `stored` state: of one number, as a step count is, like the parameter, or of
        another shape, such as the scales of codes.
        """
        if one_number:
            return torch.zeros((), device=self.parameter.device if self.step_beside else "cpu")
        dtype = stored.properties.dtype
        if stored.size == self.parameter.shape:
            kept = self.parameter.dtype if dtype.is_floating_point else dtype  # codes stay codes
            return torch.empty_like(self.parameter, dtype=kept, requires_grad=False)
        return empty_by_rows(self.parameter, stored.size, dtype)

    def copy_to_device(self) -> None:
        """Copies the parameter's new numbers to the device, if this is the host's copy."""
        if self.original is not None:
            self.parameter.copy_(self.original)


def _slots(optimizer: Any, names: Mapping[int, str]) -> Iterator[_Slot]:
    if hasattr(optimizer, "optim_dict"):  # torchao's CPUOffloadOptimizer: one optimizer per parameter, on a copy of it
        for parameter, inner in optimizer.optim_dict.items():
            for copy, step_tensors in _parameters(inner):
                yield _Slot(
                    name=names[id(parameter)],
                    parameter=copy,
                    kept=inner.state,
                    step_beside=step_tensors,
                    original=parameter,
                )
        optimizer = optimizer.d_opt  # of the parameters that are too small to offload
        if optimizer is None:
            return
    inner = optimizer.optim if _is_zero1(optimizer) else optimizer
    for parameter, step_tensors in _parameters(inner):
        yield _Slot(name=names[id(parameter)], parameter=parameter, kept=inner.state, step_beside=step_tensors)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, bool]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter, bool(group.get("fused") or group.get("capturable"))


def _is_zero1(optimizer: torch.optim.Optimizer) -> bool:
    """True if each rank's optimizer has the state of some parameters alone (ZeroRedundancyOptimizer)."""
    return type(optimizer).__name__ == "ZeroRedundancyOptimizer"


# ------------------------------------------------------------------------------------------------------ who writes


class _Deal:
    """Deals tensors out over the ranks that hold the same, in the order in which all ask: each to the rank with the
    fewest bytes.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._bytes: dict[int, list[int]] = {}

    def is_mine(self, tensor: Tensor) -> bool:
        index, count = self._place(tensor)
        dealt = self._bytes.setdefault(count, [0] * count)
        rank = dealt.index(min(dealt))
        dealt[rank] += local_part(tensor).nbytes
        return rank == index

    def _place(self, tensor: Tensor) -> tuple[int, int]:
        """Returns this rank's number among those that hold the same numbers, and how many they are."""
        mesh: Any = getattr(tensor, "device_mesh", None)
        if mesh is None:
            return self._rank, self._ranks
        index, count = 0, 1
        for dim, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
            if placement.is_replicate():
                index = index * mesh.size(dim) + mesh.get_coordinate()[dim]
                count *= mesh.size(dim)
        return index, count


class Copies:
    """Copies of a rank's tensors in the host's memory, which is kept for the next save: allocating it costs more than
    the copy. From a GPU the copies run into page-locked memory, and are complete when `take` returns.
    """

    def __init__(self) -> None:
        self._kept: State = {}

    @torch.no_grad()
    def take(self, tensors: State) -> State:
        copies = {name: self._copy(name, tensor) for name, tensor in tensors.items()}
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.current_stream().synchronize()
        return copies

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        local = local_part(tensor)
        copy = self._kept.get(name)
        if copy is None or copy.shape != local.shape or copy.dtype != local.dtype:
            copy = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
            self._kept[name] = copy
        copy.copy_(local, non_blocking=True)
        if local is tensor:
            return copy
        from torch.distributed.tensor import DTensor

        spec = spec_of(tensor)
        # Not `from_local`, which would move it to the mesh's device.
        return DTensor(copy, spec, requires_grad=False)


# ------------------------------------------------------------------------------- torch's distributed checkpoint


def _torchs() -> ModuleType:
    import torch.distributed.checkpoint

    # This is intended.
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
    return torch.distributed.checkpoint


def write(path: str, tensors: State, group: dist.ProcessGroup | None) -> None:
    """Writes this rank's tensors into the folder `path`, which must exist, together with the ranks of `group` (None:
    alone), and syncs them. Raises CheckpointError on every rank if one fails.
    """
    dcp = _torchs()
    with _plainly(f"{path} cannot be written"):
        dcp.save(
            with_chunks(tensors),
            storage_writer=_writer(path),
            planner=dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=group is None,
        )


def _writer(path: str) -> FileSystemWriter:
    """Returns a writer of the checkpoint at `path` that raises the system's error, and not what torch makes of it."""
    from torch.distributed.checkpoint import FileSystemWriter

    class PlainWriter(FileSystemWriter):
        def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
            with reveal_os_error():
                return super().write_data(plan, planner)

    return PlainWriter(path, sync_files=True)


def read_tensors(path: str, tensors: State) -> None:
    """Fills `tensors` in place. No rank waits for another."""
    dcp = _torchs()
    with _plainly(f"{path} cannot be read"):
        dcp.load(
            with_chunks(tensors),
            storage_reader=_reader(path),
            planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=True,
        )


def keys_of(path: str) -> Mapping[str, TensorStorageMetadata]:
    """Returns the names in a checkpoint, with the shape of each."""
    with _plainly(f"{path} cannot be read"):
        names = _reader(path).read_metadata().state_dict_metadata
        return cast("Mapping[str, TensorStorageMetadata]", names)  # the reader refuses others


def _reader(path: str) -> FileSystemReader:
    """Returns a reader of the checkpoint at `path` that runs nothing which its metadata, a pickle, may name."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    class PlainReader(FileSystemReader):
        def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
            with open_file(os.path.join(path, METADATA)) as file:
                metadata: Metadata = unpickling.load(file)
            for key, entry in metadata.state_dict_metadata.items():
                if not isinstance(entry, TensorStorageMetadata):
                    raise ValueError(f"`{key}` is not a tensor")  # torch would unpickle it
            for place in metadata.storage_data.values():
                if not is_plain_name(place.relative_path):
                    raise ValueError(f"it names {place.relative_path}, which is not a file of its folder")
            return metadata

    return PlainReader(path)


@contextlib.contextmanager
def _plainly(action: str) -> Iterator[None]:
    """Turns torch's CheckpointException, which is no Exception, into a CheckpointError that says what failed."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        reasons = sorted({f"{type(reason).__name__}: {reason}" for reason, _ in error.failures.values()})
        raise CheckpointError(f"{action}: {'; '.join(reasons)}") from error
    except Exception as error:
        raise CheckpointError(f"{action}: {type(error).__name__}: {error}") from error
