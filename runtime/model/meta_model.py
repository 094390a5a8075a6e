"""A model on the meta device, and its initial values tensor by tensor, for a model that no rank is to hold whole.

Model: a library model's values are drawn one by one from the seed and the name, to be cut and freed. A user's own model
is built on rank 0 under the seed, and its tensors are broadcast one at a time; the other ranks build it on the meta
device. With `reset` no rank builds it: each module's tensors are made by its `reset_parameters`, under a seed that
follows from the job's and the module's name.

Contract: all ranks ask for all values in the same order, as a broadcast is a collective. The values are the values of
the plain model that `build_model` makes. A tensor that gets no value is an error that names it. All parameters are
contiguous, as sharded rows have no other layout.

Limits: rank 0 holds a user's own model whole in the host's memory during the broadcast. Some models cannot be built on
the meta device, or keep tensors there that are neither parameters nor buffers. They are built whole on each rank first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslc.compiler.ir.program import ModelStep
from dslc.compiler.trace.private_torch import own_buffers, own_parameters
from dslc.compiler.trace.structures import attribute_tensors
from dslc.runtime.model.errors import ModelError
from dslc.runtime.model.module_builder import (
    initial_value,
    make_contiguous,
    own_model,
    skeleton,
    tie,
    under_seed,
)
from dslc.runtime.model.row_order import as_held
from dslc.runtime.model.tensor_names import seed_of

Spot = tuple[nn.Module, str]
Facts = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype by name


@dataclass(frozen=True, kw_only=True)
class Blank:
    """`spots` maps the first name of each parameter and buffer to its place in the module, or its several places if it
    is tied. They stay valid when `module` is wrapped. `numbers` are the tensors of a model that was really built;
    `whole` are shape and dtype of all its tensors, also if `spots` are only some of them.
    """

    step: ModelStep
    module: nn.Module
    spots: dict[str, list[Spot]]
    numbers: dict[str, Tensor] = field(default_factory=dict)
    whole: Facts = field(default_factory=dict)

    @torch.no_grad()
    def fill(self, place: Callable[[Tensor, Tensor], Tensor], device: torch.device | str) -> None:
        """Puts `place(value, the tensor there)` at the place of each tensor of the model."""
        unfilled = dict(self.spots)
        for name, value in self.values(torch.device(device)):
            spots = unfilled.pop(name)
            owner, attribute = spots[0]
            old = getattr(owner, attribute)
            new = place(as_held(name, value).to(old.dtype), old)
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(new, requires_grad=old.requires_grad)
            for owner, attribute in spots:
                setattr(owner, attribute, new)
        assert not unfilled, f"no initial values are known for these tensors: {', '.join(unfilled)}"

    def values(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yields each tensor's name and value, the same on all ranks."""
        if self.step.root is not None:
            return self._draw_weights()
        return self._reset() if self.step.reset else self._handed_out(device)

    def _draw_weights(self) -> Iterator[tuple[str, Tensor]]:
        for init in self.step.inits:
            yield init.parameter, initial_value(init, self.step.seed)
        for name, spots in self.spots.items():
            owner, attribute = spots[0]
            if attribute in own_buffers(owner):
                old, is_variance = getattr(owner, attribute), attribute == "running_var"
                # Not `empty_like`, which for a meta tensor loads sympy: 0.3 s.
                yield name, torch.full(old.shape, int(is_variance), dtype=old.dtype)

    # ------------------------------------------------------------------------------------------ a user's own model

    def _handed_out(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            yield from self.numbers.items()
            return
        for name, (shape, dtype) in self.whole.items():
            numbers_of_name = self.numbers.pop(name, None)
            value = (
                torch.empty(shape, dtype=dtype, device=device)
                if numbers_of_name is None
                else numbers_of_name.to(device).contiguous()
            )
            dist.broadcast(value, 0)
            if name in self.spots:
                yield name, value

    def _reset(self) -> Iterator[tuple[str, Tensor]]:
        names = {id(owner): {} for spots in self.spots.values() for owner, _ in spots}  # type: dict[int, dict[str, str]]
        for name, spots in self.spots.items():
            for owner, attribute in spots:
                names[id(owner)][attribute] = name
        reset_names: set[str] = set()
        for spots in list(self.spots.values()):
            owner = next(
                (module for module, _ in spots if callable(getattr(module, "reset_parameters", None))), spots[0][0]
            )
            path = names[id(owner)]
            new = {attribute: name for attribute, name in path.items() if name not in reset_names}
            if not new:
                continue
            reset_tensors = _by_reset(owner, path, self.step)
            reset_names.update(new.values())
            yield from ((name, reset_tensors[attribute]) for attribute, name in new.items())


def blank(step: ModelStep) -> Blank:
    """Returns the model of `step` without its numbers. Raises as `build_model` does."""
    if step.root is not None:
        module = skeleton(step)
        return Blank(step=step, module=module, spots=spots_of(module))
    if not step.reset and (not dist.is_initialized() or dist.get_rank() == 0):
        module = own_model(step)
        numbers = take_out(module)
        module_on_meta = _blank_of_module(step, module, numbers)
        _facts_of_rank_0(module_on_meta.whole)
        return module_on_meta
    module_on_meta = _blank_of_module(step, _on_meta(step), {})
    if step.reset:
        _check_resets(step, module_on_meta.module)
        return module_on_meta
    facts = _facts_of_rank_0(module_on_meta.whole)
    if module_on_meta.whole != facts:  # as of an orthogonal parametrization, which is another one on the meta device
        module = own_model(step)
        take_out(module)
        module_on_meta = _blank_of_module(step, module, {})
        _agree(step, module_on_meta.whole, facts)
    return module_on_meta


def build_model(step: ModelStep, device: torch.device | str) -> nn.Module:
    """Returns the model on `device`, in float32, in training mode, its tied weights shared.

    Raises ModelError if a user's own function returns no module; an exception of the function passes through.
    """
    if step.root is None and not step.reset:
        module = own_model(step).to(device)
        tie(module, step.ties)
    else:
        module_on_meta = blank(step)
        module_on_meta.fill(lambda value, _: value.to(device), device)
        module = module_on_meta.module
    if step.channels_last:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module


def _blank_of_module(step: ModelStep, module: nn.Module, numbers: dict[str, Tensor]) -> Blank:
    spots = spots_of(module)
    full_facts = {name: _facts(getattr(*places[0])) for name, places in spots.items()}
    return Blank(step=step, module=module, spots=spots, numbers=numbers, whole=full_facts)


def spots_of(module: nn.Module) -> dict[str, list[Spot]]:
    """Returns the places of each parameter and buffer of `module`, by its first name."""
    names: dict[int, str] = {}
    spots: dict[str, list[Spot]] = {}
    for path, part in module.named_modules():
        for name, tensor in (*own_parameters(part).items(), *own_buffers(part).items()):
            if tensor is not None:
                first_name = names.setdefault(id(tensor), f"{path}.{name}" if path else name)
                spots.setdefault(first_name, []).append((part, name))
    return spots


def take_out(module: nn.Module) -> dict[str, Tensor]:
    """Moves `module` to the meta device, in place, and returns the tensors it had; tied ones stay tied."""
    numbers = {}
    for name, spots in spots_of(module).items():
        old = getattr(*spots[0])
        numbers[name] = old.detach()
        new = torch.empty(old.shape, dtype=old.dtype, device="meta")
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=old.requires_grad)
        for owner, attribute in spots:
            setattr(owner, attribute, new)
    return numbers


def _on_meta(step: ModelStep) -> nn.Module:
    try:
        with torch.device("meta"):
            module = own_model(step)
    except ModelError:
        raise
    except (RuntimeError, TypeError, ValueError):
        pass  # torch and numpy raise these for tensors without numbers: the module is built again, with numbers
    else:
        if not any(_has_hidden_meta_tensors(part) for part in module.modules()):
            make_contiguous(module)
            return module
    module = own_model(step)
    take_out(module)
    return module


def _has_hidden_meta_tensors(module: nn.Module) -> bool:
    """True if a module keeps tensors on the meta device that are neither parameters nor buffers."""
    visible = {id(tensor) for tensor in (*own_parameters(module).values(), *own_buffers(module).values())}
    return any(tensor.is_meta and id(tensor) not in visible for _, tensor in attribute_tensors(module))


def _facts(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.dtype


def _facts_of_rank_0(facts: Facts) -> Facts:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return facts
    broadcast = [facts]
    dist.broadcast_object_list(broadcast, 0)
    return dict(broadcast[0])


def _agree(step: ModelStep, facts: Facts, facts_of_rank_0: Facts) -> None:
    """Raises ModelError if this rank has built another model than rank 0."""
    for name in (*facts_of_rank_0, *facts):
        if facts_of_rank_0.get(name) != facts.get(name):
            raise ModelError(
                f"{job_line(step)}`{name}` is {_words(facts.get(name))} on rank {dist.get_rank()} and "
                f"{_words(facts_of_rank_0.get(name))} on rank 0: the model has to be the same on every rank"
            )


def _words(fact: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "not there" if fact is None else f"{str(fact[1]).removeprefix('torch.')} of shape {fact[0]}"


def job_line(step: ModelStep) -> str:
    """Returns the place in the job that names a user's own model, with which an error's message begins."""
    line = (step.python.line if step.python else "") or (step.transformers.line if step.transformers else "")
    return f"{line}: " if line else ""


def _check_resets(step: ModelStep, module: nn.Module) -> None:
    """Raises ModelError for a module that `reset_parameters` could not initialize alone."""
    for name, part in module.named_modules():
        has_tensors = any(
            tensor is not None for tensor in (*own_parameters(part).values(), *own_buffers(part).values())
        )
        if has_tensors and not callable(getattr(part, "reset_parameters", None)):
            kind = type(part).__name__
            raise ModelError(
                f"{job_line(step)}the module `{name or kind}` ({kind}) has no `reset_parameters`, which would give its "
                "tensors their numbers: without it the model has to be built whole"
            )


def _by_reset(module: nn.Module, names: dict[str, str], step: ModelStep) -> dict[str, Tensor]:
    """Returns the module's own tensors as `reset_parameters` makes them, on the CPU; leaves the module as it was."""
    name = next(iter(names.values())).rpartition(".")[0]
    reset: Callable[[], None] = module.reset_parameters  # type: ignore[assignment]
    named = (*own_parameters(module).items(), *own_buffers(module).items())
    originals = {attribute: tensor for attribute, tensor in named if tensor is not None}  # all: drawn in one stream
    for attribute, old in originals.items():
        empty = _unset(old)
        if isinstance(old, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=old.requires_grad)  # integers cannot require gradients
        setattr(module, attribute, empty)
    with under_seed(seed_of(step.seed, name)):
        reset()
    fresh = {attribute: getattr(module, attribute).detach() for attribute in names}
    for attribute, old in originals.items():
        setattr(module, attribute, old)
    for attribute in names:
        if _is_unset(fresh[attribute]):
            raise ModelError(f"{job_line(step)}`reset_parameters` of `{name}` leaves `{attribute}` without a value")
    return fresh


def _unset(old: Tensor) -> Tensor:
    """Returns a tensor like `old` with numbers that no `reset_parameters` would leave."""
    if old.dtype.is_floating_point:
        return torch.full(tuple(old.shape), float("nan"), dtype=old.dtype)
    if old.dtype == torch.bool or old.dtype.is_complex:
        return torch.zeros(tuple(old.shape), dtype=old.dtype)
    return torch.full(tuple(old.shape), torch.iinfo(old.dtype).min, dtype=old.dtype)


def _is_unset(tensor: Tensor) -> bool:
    if tensor.dtype.is_floating_point:
        return bool(tensor.isnan().any())
    if tensor.dtype in (torch.bool, torch.uint8) or tensor.dtype.is_complex:
        return False
    return bool(tensor.eq(torch.iinfo(tensor.dtype).min).any())
