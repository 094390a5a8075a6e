"""The batches that a module is traced with: of few samples, and of more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from dslc.compiler.ir.tensors import LeafFact, TensorFact, TreeFact
from dslc.compiler.trace.fake_tensor_mode import FakeTensorMode
from dslc.compiler.trace.structures import UserValue, flatten, map_tensors, paths, save, tensors, unflatten

SMALL, LARGE = 2, 4  # samples; a single one would make batch norm fail


class Example:
    """Batches of `SMALL` and `LARGE` samples, with their targets, of a source that makes structures.

    They are real: where a forward pass looks at numbers, it is run on these.
    """

    def __init__(self, small: tuple[UserValue, UserValue], large: tuple[UserValue, UserValue]) -> None:
        self._pairs = {SMALL: small, LARGE: large}

    def input(self, samples: int) -> UserValue:
        return self._pairs[samples][0]

    def target(self, samples: int) -> UserValue:
        return self._pairs[samples][1]

    @property
    def length(self) -> int:
        """Returns the positions of the tensors, which all are (batch, positions, …); 0 if some are not."""

        lengths = {tensor.shape[1] if tensor.dim() > 1 else 0 for tensor in tensors(self._pairs[SMALL])}
        return lengths.pop() if len(lengths) == 1 else 0

    def piece(self, start: int, count: int) -> Example:
        """Returns the batches of these positions alone."""

        pairs = (map_tensors(lambda tensor: tensor.narrow(1, start, count), pair) for pair in self._pairs.values())
        return Example(*pairs)


def read_example(path: str) -> Example:
    """Returns the example that `trace_source` wrote for this check: its objects are of the user's own classes."""

    return Example(*torch.load(path, weights_only=False))


class Outputs:
    """A file for outputs like a traced module's, with targets. A loss and metrics are tried with them."""

    def __init__(self, path: str, target: TensorFact | Example) -> None:
        self._path, self._target = path, target

    def write(self, small: object, large: object) -> None:
        """Writes random outputs of the forms of these two, with targets, as pairs."""

        def random_leaf(leaf: object) -> object:
            if not isinstance(leaf, torch.Tensor):  # an object of another kind may hold tensors without numbers
                return leaf if isinstance(leaf, int | float | str | None) else None
            shape, dtype = tuple(leaf.shape), leaf.dtype
            return torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)

        forms = [flatten(output) for output in (small, large)]
        outputs = [unflatten([random_leaf(leaf) for leaf in leaves], form) for leaves, form in forms]
        save(list(zip(outputs, map(self._target_batch, (SMALL, LARGE)), strict=True)), self._path)

    def _target_batch(self, samples: int) -> UserValue:
        target = self._target
        return target.target(samples) if isinstance(target, Example) else batch_of(target, samples, None)


def batch_of(example: TensorFact | Example, samples: int, fake: FakeTensorMode | None) -> UserValue:
    """Returns the input of `samples` samples; in `fake` its tensors have no numbers, else they are an example's, or
    noise.
    """

    if isinstance(example, Example):
        return without_numbers(example.input(samples), fake)
    shape, dtype = (samples, *example.shape), getattr(torch, example.dtype)
    if fake is None:
        return torch.randn(shape) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)
    with fake:
        return torch.empty(shape, dtype=dtype)


def length_of(input: TensorFact | Example) -> int:
    """Returns the positions of a sequence; 0 if it is none."""
    if isinstance(input, Example):
        return input.length
    return input.shape[0] if input.shape else 0


def piece_of(input: TensorFact | Example, start: int, count: int) -> TensorFact | Example:
    """Returns the input of these positions alone."""
    if isinstance(input, Example):
        return input.piece(start, count)
    return replace(input, shape=(count, *input.shape[1:]))


def batch_names(batch: object) -> tuple[str, ...]:
    """Returns the names of a batch that is a mapping."""
    return tuple(batch) if isinstance(batch, Mapping) else ()


def without_numbers(value: object, fake: FakeTensorMode | None) -> UserValue:
    """Returns a structure with its tensors in `fake`; as it is for None."""

    if fake is None:
        return value

    def blank(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    with fake:
        return map_tensors(blank, value)


def grown(small: object, large: object) -> TreeFact:
    """Returns the fact of a structure, from its batches of `SMALL` and `LARGE` samples."""

    ones, large_leaves = flatten(small)[0], flatten(large)[0]
    if len(ones) != len(large_leaves):  # a list with an entry for each sample
        return TreeFact(leaves=tuple(_totals(ones, large_leaves)))
    leaves = []
    for path, one, large_leaf in zip(paths(small), ones, large_leaves, strict=True):
        if not isinstance(one, torch.Tensor):
            continue
        growth = tuple((b - a) // (LARGE - SMALL) for a, b in zip(one.shape, large_leaf.shape, strict=True))
        fixed = tuple(a - SMALL * more for a, more in zip(one.shape, growth, strict=True))
        leaves.append(LeafFact(path=path, fixed=fixed, grown=growth, dtype=_name(one)))
    return TreeFact(leaves=tuple(leaves))


def _totals(ones: list[UserValue], large_leaves: list[UserValue]) -> Iterator[LeafFact]:
    """Yields, for each dtype, the numbers of all its tensors as one."""

    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for place, leaves in enumerate((ones, large_leaves)):
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                totals[_name(leaf)][place] += leaf.numel()
    for dtype, (one, large_total) in totals.items():
        growth = (large_total - one) // (LARGE - SMALL)
        yield LeafFact(path="[…]", fixed=(one - SMALL * growth,), grown=(growth,), dtype=dtype)


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
