"""Recomputation: runs a module's forward pass again in the backward pass, to save the memory of its activations.

Model: the module's `forward` is replaced, on the instance, by one that goes through `torch.utils.checkpoint` (Chen et
al. 2016, arXiv:1604.06174). `full` keeps the module's inputs. `selective` also keeps the results of matrix products,
convolutions and attention (Korthikanti et al. 2022, arXiv:2205.05198): the account's `LayerMemory.selective`
(`compiler/model/tape.py`).

Contract: names, parameters and hooks stay as they are; hooks (gathering parameters, casting inputs) run outside and are
not repeated. Gradients equal the plain module's to the bit, with one exception: if a weight is used several times under
autocast, its 16-bit copy is made for each use, and its gradients are added up in float32. Buffers are written once: the
second pass works on copies. A module that draws random numbers draws the same ones again: by sample (sample_pass.py),
or of torch's, Python's and numpy's generators, whose states are kept. Without gradients the module runs as it is.

Limits: the module's parameters, and all that its forward reads from outside, must not change before the backward pass.
If the output of a forward pass depends on a buffer that the pass writes, the buffer has its new value in the second
pass. Under `torch.compile` there are no copies, as the compiler writes buffers once.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from dslc.compiler.ir.program import RecomputeStep
from dslc.compiler.trace.private_torch import ATTENTION, AnyDropout, overloads_of, own_buffers
from dslc.runtime.model.documents import Documents, documents_of
from dslc.runtime.technique import sample_pass

Context: TypeAlias = contextlib.AbstractContextManager[object]
Contexts = Callable[[], tuple[Context, Context]]  # of the first pass and of the second

_GROUPED = ("_grouped_mm", "multiply_rows")  # plain and compiled (runtime/model/experts/grouped_product.py)
_KEPT = ("mm", "addmm", "bmm", "baddbmm", *_GROUPED, "convolution", *ATTENTION)
_NOISELESS = ("torch.nn.", "dslc.runtime.")  # modules of these packages draw random numbers only in dropout


def apply(step: RecomputeStep, model: nn.Module) -> None:
    """Makes the modules of `step` recompute, in place; their names and parameters stay."""
    for name in step.modules if step.kind != "none" else ():
        module = model.get_submodule(name)
        module.forward = _recomputing(module, selective=step.kind == "selective")


def _recomputing(module: nn.Module, *, selective: bool) -> Callable[..., object]:
    forward = module.forward
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws_numbers(module)}
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy) if selective else noop_context_fn
    # The compiler takes no other contexts; what Python and numpy draw are constants or inputs of its graphs.
    compiled = options | ({"context_fn": contexts} if selective else {})
    if options["preserve_rng_state"]:  # torch preserves its own generators alone
        contexts = functools.partial(_drawing_alike, contexts)
    documents = documents_of(module)
    if documents is not None:
        contexts = functools.partial(_of_same_documents, documents, contexts)
    sees = options["preserve_rng_state"] or documents is not None
    plain = options | ({"context_fn": contexts} if selective or sees else {})
    writing_once = options | {"context_fn": functools.partial(_writing_once, module, contexts)}
    writes = any(True for _ in module.buffers())

    def once_and_again(*arguments: object, **named: Any) -> object:
        if not torch.is_grad_enabled():
            return forward(*arguments, **named)
        if torch.compiler.is_compiling():
            return checkpoint(forward, *arguments, **compiled, **named)
        with _casting_anew():
            return checkpoint(forward, *arguments, **(writing_once if writes and module.training else plain), **named)

    return once_and_again


@contextlib.contextmanager
def _casting_anew() -> Iterator[None]:
    """Disables autocast's cache of 16-bit weights in both passes: only the first would find a copy of another call."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def draws_numbers(module: nn.Module) -> bool:
    """True if a forward pass of the module may draw random numbers of a generator, judged by its submodules."""
    for part in module.modules():
        if sample_pass.is_by_sample(part) and isinstance(part, AnyDropout):
            continue
        if isinstance(part, AnyDropout | nn.RNNBase | nn.MultiheadAttention):
            rate = part.p if isinstance(part, AnyDropout) else part.dropout
            if rate > 0:
                return True
        elif not type(part).__module__.startswith(_NOISELESS):
            return True  # a user's own module may call a function that draws
    return False


def _of_same_documents(documents: Documents, contexts: Contexts) -> tuple[Context, Context]:
    """Returns the contexts of both passes; the second meets the documents of the input of the first."""
    first, second = contexts()
    seen = documents.now
    return first, _EachTime(lambda: documents.revisit(seen, second))


def _drawing_alike(contexts: Contexts) -> tuple[Context, Context]:
    """Returns the contexts of both passes; in the second Python's and numpy's generators draw the same numbers."""
    first, second = contexts()
    states: list[Any] = []
    return _noting_states(states, first), _EachTime(lambda: _from_states(states, second))


@contextlib.contextmanager
def _noting_states(states: list[Any], within: Context) -> Iterator[None]:
    states[:] = [random.getstate(), np.random.get_state()]
    with within:
        yield


@contextlib.contextmanager
def _from_states(states: list[Any], within: Context) -> Iterator[None]:
    later = random.getstate(), np.random.get_state()
    random.setstate(states[0])
    np.random.set_state(states[1])
    try:
        with within:
            yield
    finally:
        random.setstate(later[0])
        np.random.set_state(later[1])


def _policy(context: object, operation: object, *arguments: object, **named: object) -> CheckpointPolicy:
    # By name: not every build has the operations of other devices.
    name = overloads_of(operation).__name__
    return CheckpointPolicy.MUST_SAVE if name in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class _EachTime(contextlib.AbstractContextManager[None]):
    """Makes a context each time that it is entered: a backward pass in two halves recomputes a module twice."""

    def __init__(self, make: Callable[[], Context]) -> None:
        self._make = make
        self._open: list[Context] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._open.append(context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> bool | None:
        return self._open.pop().__exit__(kind, error, at)


def _writing_once(module: nn.Module, contexts: Contexts) -> tuple[Context, Context]:
    first, second = contexts()
    return first, _EachTime(lambda: _on_copies(module, second))


@contextlib.contextmanager
def _on_copies(module: nn.Module, within: Context) -> Iterator[None]:
    kept = [(part, dict(own_buffers(part))) for part in module.modules() if own_buffers(part)]
    for part, buffers in kept:
        own_buffers(part).update({name: _copy(buffer) for name, buffer in buffers.items()})
    try:
        with within:  # entered after the copies, which are no operations of the module
            yield
    finally:
        for part, buffers in kept:
            own_buffers(part).update(buffers)


def _copy(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()
