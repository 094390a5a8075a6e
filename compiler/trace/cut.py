"""Cuts a module into layers, and notes what some modules get in a forward pass.

A *block* is an element of an `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential` that has two or more of its class,
each with parameters and submodules. Elements of a container that is never called, as a list in a list is not, are those
of the container around it. Attributes whose names differ in their numbers, `block1` and `block2`, are elements too, if
they have no such block inside. Of nested blocks the outermost counts, but `_no_split_modules` (transformers) comes
first. Other modules are layers as far up the tree as they contain no block.

Experts are those of a library's network, whose weights are stacked over them (compiler/ir/parameter_names.py).
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from dslc.compiler.ir.module_facts import ExpertFacts
from dslc.compiler.ir.parameter_names import is_stack
from dslc.compiler.trace.private_torch import AnyBatchNorm, own_parameters, storage_identity


class ModuleCut:
    """The layers of a module by path, and the subset that are blocks."""

    def __init__(self, model: nn.Module) -> None:
        self.blocks = _blocks(model)
        self.layers: dict[str, nn.Module] = {}
        self._met: set[int] = set()
        self._split("", model)
        self._owners = {name: path for path, module in self.layers.items() for name in _names(path, module)}

    def owner(self, name: str) -> str:
        """Returns the layer that a parameter or buffer belongs to; "" for the root."""
        return self._owners.get(name, "")

    def _split(self, path: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            full = f"{path}.{name}" if path else name
            if id(child) in self._met:
                continue
            self._met.add(id(child))
            inside = any(block.startswith(full + ".") for block in self.blocks)
            if full not in self.blocks and (inside or _is_plain(child) or _is_wrapper(child)):
                self._split(full, child)
            else:
                self.layers[full] = child


def _names(path: str, module: nn.Module) -> list[str]:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return [f"{path}.{name}" for name, _ in named]


def _is_plain(module: nn.Module) -> bool:
    """True for a container of torch's own, which adds nothing to its modules."""

    return type(module) in (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)


def _is_wrapper(module: nn.Module) -> bool:
    children = list(module.children())
    return len(children) == 1 and not own_parameters(module) and any(True for _ in children[0].children())


def _blocks(model: nn.Module) -> set[str]:
    modules = dict(model.named_modules())
    plain = {path for path, module in modules.items() if _is_plain(module)}
    named = set(getattr(model, "_no_split_modules", None) or ())
    named_blocks, similar, numbered = [], [], []
    for path, module in modules.items():
        if _is_uncalled(module) or isinstance(module, torch.nn.Sequential):
            children = list(_elements(path, module))
            named_blocks += [name for name, child in children if type(child).__name__ in named]
            similar += _repeated(children)
        else:
            numbered += _repeated_attributes(path, module)
    # A plain Sequential of blocks is a list of them rather than a block.
    similar = [p for p in similar if not (p in plain and any(_within(q, p) for q in similar))]
    similar = [p for p in similar if not any(_within(p, q) or _within(q, p) for q in named_blocks)]
    numbered = [p for p in numbered if not any(_within(p, q) or _within(q, p) for q in (*named_blocks, *similar))]
    candidates = (named_blocks, similar, numbered)
    return {p for paths in candidates for p in paths if not any(_within(p, q) for q in paths)}


def _is_uncalled(module: nn.Module) -> bool:
    """True for a container without a forward pass, such as an `nn.ModuleList` or `nn.ModuleDict`."""
    # Statically: a class of torch.jit has a descriptor there that can only be read from a module.
    return inspect.getattr_static(type(module), "forward") is torch.nn.Module.forward


def _elements(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules that a container holds, and the modules of containers in it that are never called."""
    for name, child in module.named_children():
        full = f"{path}.{name}" if path else name
        if _is_uncalled(child):
            yield from _elements(full, child)
        else:
            yield full, child


def _repeated_attributes(path: str, module: nn.Module) -> list[str]:
    """Returns the attributes that are repeated modules and have names which differ in their numbers alone."""
    stems: dict[str, list[tuple[str, nn.Module]]] = defaultdict(list)
    for full, child in _elements(path, module):
        stem = re.sub(r"\d+", "*", full)
        if stem != full and any(True for _ in child.children()):
            stems[stem].append((full, child))
    return [name for children in stems.values() for name in _repeated(children)]


def _repeated(modules: list[tuple[str, nn.Module]]) -> list[str]:
    """Returns the modules with parameters and submodules of whose kind there are two or more."""
    kinds: dict[object, list[str]] = defaultdict(list)
    for path, module in modules:
        composed = any(True for _ in module.children()) or not type(module).__module__.startswith("torch.nn")
        if composed and any(True for _ in module.parameters()):
            kinds[_kind(module)].append(path)
    return [path for paths in kinds.values() if len(paths) > 1 for path in paths]


def _kind(module: nn.Module) -> object:
    """Returns a module's class; for a plain container, also the classes of its parts."""
    return (type(module), *(_kind(child) for child in module.children())) if _is_plain(module) else type(module)


def _within(path: str, ancestor: str) -> bool:
    return path.startswith(ancestor + ".")


DenseOutputs = Sequence[tuple[str, object]]  # the path of a dense layer and what a call returns, in order


@contextmanager
def dense_outputs(model: nn.Module, read: set[int]) -> Iterator[DenseOutputs]:
    """Yields the outputs of torch's own dense layers in the forward passes inside, before other hooks of theirs. `read`
    is the memory that operations have read, from which an output's is taken as the layer returns it.
    """
    outputs: list[tuple[str, object]] = []

    def note(path: str, output: torch.Tensor) -> None:
        read.discard(storage_identity(output))
        outputs.append((path, output))

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if type(module) is nn.Linear and "forward" not in vars(module):
                handle = module.register_forward_hook(lambda *call, path=path: note(path, call[-1]), prepend=True)
                hooks.callback(handle.remove)
        yield outputs


def head_among(outputs: DenseOutputs, output: object, read: Collection[int]) -> str:
    """Returns the dense layer, called once, whose output is the model's and is not `read`; "" if none."""
    paths = [path for path, _ in outputs]
    for path, result in outputs:
        if result is output and isinstance(result, torch.Tensor) and paths.count(path) == 1:
            return "" if storage_identity(result) in read else path
    return ""


# ------------------------------------------------------------------------------------------------- what modules get


@contextmanager
def expert_calls(model: nn.Module, samples: int) -> Iterator[list[ExpertFacts]]:
    """Fills the list, when the forward pass inside is done, with the stacks of experts and the rows of a sample.

    A stack that is not called, in a block that is left out, has the rows of the others.
    """
    stacks = {name: module for name, module in model.named_modules() if is_stack(module)}
    rows: dict[str, int] = {}
    facts: list[ExpertFacts] = []
    with ExitStack() as hooks:
        for name, module in stacks.items():

            def note(module: nn.Module, args: tuple[torch.Tensor, ...], name: str = name) -> None:
                rows[name] = rows.get(name, 0) + args[1].numel() // samples

            hooks.callback(module.register_forward_pre_hook(note).remove)
        yield facts
    usual = max(rows.values(), default=0)
    for name, module in stacks.items():
        experts, width, _ = module.down_proj.shape
        facts.append(ExpertFacts(module=name, experts=experts, rows=rows.get(name, usual), width=width))


@contextmanager
def normalised_numbers(model: nn.Module, samples: int) -> Iterator[list[int]]:
    """Yields the count of numbers per channel that each batch norm with batch statistics gets, of each of
    `samples`.
    """
    sizes: list[int] = []

    def note(module: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
        if module.training:
            input, *_ = *args, *kwargs.values()
            sizes.append(input.numel() // input.shape[1] // samples)

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, AnyBatchNorm):
                stack.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
        yield sizes
