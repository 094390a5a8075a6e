"""Finds blocks of a module that are alike, so that the facts of one hold for all.

Model: the module runs forward once, without memory, and each operation is recorded, by block. The record has the
operation, its plain arguments, and the origin of each tensor: the block's input, a parameter of it, an operation of it,
or anything outside. Blocks are alike if their records are the same and

- they have modules of the same classes, with equal attributes, and parameters and buffers of the same shapes. An
  attribute may differ (`layer_idx` does) as long as no forward pass reads it, which is watched (`Unread`);
- each is called once, directly after the block before, and takes that block's output; its other arguments are the same
  object for all blocks, or plain and equal;
- nothing else takes what it makes, it writes into nothing that was there before, and no attribute of the whole module
  changes.

Blocks may repeat one by one, or in groups (one with local attention after each five of another kind). In such a row
each block leaves the same state. So the blocks in the middle can be skipped: `RepeatedBlocks` names them, and the
representative of each.

Contract: the result is a proposal. `block_reuse.py` measures two groups in the middle. It drops the proposal if they
differ in anything, or if an attribute that differs was read. Whatever is not understood here makes a block unlike all
others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dslc.compiler.trace.batch import Example
from dslc.compiler.trace.cut import ModuleCut
from dslc.compiler.trace.reuse.block_attributes import State, Unread, by_structure, differences, values_of
from dslc.compiler.trace.reuse.block_fingerprint import BlockRecorder, Output

if TYPE_CHECKING:
    from torch import nn

    from dslc.compiler.ir.tensors import TensorFact
    from dslc.compiler.trace.private_torch import FakeTensorMode

LONGEST = 12  # blocks of a group that repeats
BEFORE, AFTER = 3, 1  # groups that are kept before and after those left out


@dataclass(frozen=True)
class RepeatedBlocks:
    """Blocks that are left out, in order; for each the block that stands for it, and that one's earlier twin, which has
    to have the same facts. `outputs` has, by block, the form of the output: leaves of the input, or plain values.
    """

    stands: Mapping[str, str]
    twins: Mapping[str, str]
    outputs: Mapping[str, Output]
    unread: Unread


def find_repeated_blocks(
    model: nn.Module, cut: ModuleCut, fake: FakeTensorMode, input: TensorFact | Example
) -> tuple[RepeatedBlocks | None, bool]:
    """Returns the blocks that can be skipped, or None; and whether running the module has changed it, so that it must
    be made again.
    """
    groups = by_structure(cut)
    if not groups:
        return None, False
    before = State(model)
    differing = {
        (type(one), name)
        for paths in groups.values()
        for path in paths[1:]
        for one, name in differences(cut.layers[paths[0]], cut.layers[path])
    }
    unread = Unread(differing)
    run = BlockRecorder(model, cut, fake, input, {path for paths in groups.values() for path in paths})
    with unread.watched():
        output = run.forward()
    if before.changed(model):
        return None, True
    calls = run.finished(output)
    read = [name for _, name in unread.read]
    structure = {path: key for key, paths in groups.items() for path in paths}
    labels = [
        None if call.strange else (structure[call.path], call.terms, values_of(cut.layers[call.path], read))
        for call in calls
    ]
    found = _repeated(labels, [call.follows for call in calls])
    if found is None:
        return None, False
    first, period, count = found
    stands, twins = {}, {}
    for n in range(first + BEFORE * period, first + (count - AFTER) * period):
        stand = first + (BEFORE - 1) * period + (n - first) % period
        stands[calls[n].path] = calls[stand].path
        twins[calls[stand].path] = calls[stand - period].path
    outputs = {call.path: call.output for call in calls if call.path in stands}
    return RepeatedBlocks(stands, twins, outputs, Unread(unread.watchable - unread.read)), False


def _repeated(labels: Sequence[Any], follows: Sequence[bool]) -> tuple[int, int, int] | None:
    """Returns the first call, the length and the count of the groups that repeat so that most calls can be left out."""
    numbers = _numbered(labels)
    fits = [number is not None and after for number, after in zip(numbers, follows, strict=True)]
    best, most = None, 1
    for period in range(1, LONGEST + 1):
        first = 0
        while first < len(numbers):
            end = first
            while end < len(numbers) and fits[end] and (end < first + period or numbers[end] == numbers[end - period]):
                end += 1
            count = (end - first) // period
            if (left_out := (count - BEFORE - AFTER) * period) > most:
                best, most = (first, period, count), left_out
            first = max(first, end - period) + 1
    return best


def _numbered(labels: Sequence[Any]) -> list[int | None]:
    """Returns a number for each label, the same for equal ones; None for none."""
    known: dict[Any, int] = {}
    return [None if label is None else known.setdefault(label, len(known)) for label in labels]
