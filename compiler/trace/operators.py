"""Propagates shares through operations: if a rank has one of equal pieces of a tensor, which piece of the result does
it have?

Model: a share lies along one dim of its tensor, which is `outer` x `size` x the rest, and its pieces are equal parts of
`size`. The outer part are, for example, samples joined with the heads for a product; the rest is the size of a head in
the row that follows. Rules are by the names of torch's operations below autograd (`aten`), as they come when a module
runs.

Contract: `follow` returns the share that the result is, as if it had been computed from the whole; it raises `Refused`
for an operation that works across the pieces, or is not known. The shapes are those of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from dslc.compiler.trace.private_torch import Operator


class Share(NamedTuple):
    """A share along `dim`, of size `outer` x `size` x the rest: each rank has an equal part of `size`."""

    dim: int
    outer: int
    size: int


class Refused(Exception):
    """Why a plan cannot be used, in one line; the module, and the remedy."""

    def __init__(self, text: str, module: str = "", help: str = "") -> None:
        super().__init__(text)
        self.text, self.module, self.help = text, module, help


class Operation:
    """A call of one of torch's operations, its arguments by name, and the shares among them."""

    def __init__(
        self, func: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], shared: Mapping[int, Share]
    ) -> None:
        import torch

        from dslc.compiler.trace.private_torch import schema_of, tree_leaves

        self.name = schema_of(func).name.removeprefix("aten::")
        self.pointwise = torch.Tag.pointwise in func.tags
        self.arguments = {a.name: v for a, v in zip(schema_of(func).arguments, args, strict=False)} | dict(kwargs)
        self._shared = shared
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self.shares = [(t, shared[id(t)]) for t in tensors if id(t) in shared]
        self.wholes = [t for t in tensors if id(t) not in shared]

    def share(self, name: str) -> Share | None:
        return self._shared.get(id(self.arguments.get(name)))

    @property
    def first(self) -> tuple[torch.Tensor, Share]:
        return self.shares[0]


def follow(operation: Operation, out: torch.Tensor) -> Share | None:
    """Returns the share that `out`, a result of an operation on a share, is; None: whole."""
    rule: _Rule | None = _aligned if operation.pointwise else _RULES.get(operation.name)
    if rule is None:
        raise Refused(f"dslc does not know the result of `{operation.name}` on shares")
    return rule(operation, out)


def follow_piece(operation: Operation, out: torch.Tensor) -> Share | None:
    """Returns the same where shares are pieces of sequences, whose numbers may look up rows of tables, and meet
    parameters.
    """
    rule = _OF_PIECES.get(operation.name)
    return follow(operation, out) if rule is None else rule(operation, out)


def _across(operation: Operation) -> Refused:
    tensor, share = operation.first
    return Refused(
        f"`{operation.name}` works across dim {share.dim} of {tuple(tensor.shape)}, of which ranks have shares"
    )


def _aligned(operation: Operation, out: torch.Tensor) -> Share:
    """Elementwise operations, dims aligned at the end."""
    found = {Share(s.dim + out.dim() - t.dim(), s.outer, s.size) for t, s in operation.shares}
    share = found.pop()
    if found or any(t.shape[s.dim] != out.shape[share.dim] for t, s in operation.shares):
        raise Refused(f"`{operation.name}` combines shares that are cut differently")
    back = share.dim - out.dim()
    if any(t.dim() >= -back and t.shape[back] != 1 for t in operation.wholes):
        raise Refused(f"`{operation.name}` combines a share with a tensor that every rank has whole")
    return share


def _viewed(operation: Operation, out: torch.Tensor) -> Share:
    """Views: the same numbers in the same order under another shape."""
    tensor, share = operation.first
    left, before = prod(tensor.shape[: share.dim]) * share.outer, 1
    for dim, size in enumerate(out.shape):
        if before * size > left:
            outer = left // before
            rest = size // outer
            fits = left % before == 0 and size % outer == 0 and (rest % share.size == 0 or share.size % rest == 0)
            if not fits:
                break
            return Share(dim, outer, min(rest, share.size))
        before *= size
    raise Refused(f"the shares of {tuple(tensor.shape)} are none of {tuple(out.shape)}")


def _moved(operation: Operation, out: torch.Tensor) -> Share:
    tensor, share = operation.first
    order = list(range(tensor.dim()))
    if operation.name == "permute":
        order = [dim % tensor.dim() for dim in operation.arguments["dims"]]
    else:
        one, other = (operation.arguments.get(name, n) for n, name in enumerate(("dim0", "dim1")))
        order[one], order[other] = order[other], order[one]
    return share._replace(dim=order.index(share.dim))


def _expanded(operation: Operation, out: torch.Tensor) -> Share:
    tensor, share = operation.first
    return share._replace(dim=share.dim + out.dim() - tensor.dim())


def _along(operation: Operation, out: torch.Tensor) -> Share:
    """Operations along one dim or several, which may not be that of the share."""
    tensor, share = operation.first
    given = operation.arguments.get("dim", operation.arguments.get("dims", _UNSAID.get(operation.name)))
    dims = [given] if isinstance(given, int) else list(given or range(tensor.dim()))
    dims = [dim % tensor.dim() for dim in dims]
    if share.dim in dims and not (operation.name == "slice" and out.shape == tensor.shape):
        raise _across(operation)
    lost = tensor.dim() - out.dim()
    return share._replace(dim=share.dim - (sum(dim < share.dim for dim in dims) if lost else 0))


def _joined(operation: Operation, out: torch.Tensor) -> Share:
    share = operation.first[1]
    stacks = operation.name == "stack"
    dim = operation.arguments.get("dim", 0) % out.dim()
    if operation.wholes or any(other != share for _, other in operation.shares):
        raise Refused(f"`{operation.name}` joins a share with a tensor that is none, or is cut differently")
    if not stacks and dim == share.dim:
        raise _across(operation)
    return share._replace(dim=share.dim + (stacks and dim <= share.dim))


def _product(operation: Operation, out: torch.Tensor) -> Share:
    """Matrix products, of which at least one factor is a share, not along the summed dim."""
    a, b = operation.share("self"), operation.share("mat2")
    last = out.dim() - 1
    if (a and a.dim == last) or (b and b.dim == last - 1):
        raise _across(operation)
    found = a or b
    # In a batch of matrices both factors have the share, otherwise one of them.
    if found is None or (a != b if found.dim < last - 1 else bool(a and b)):
        raise Refused(f"`{operation.name}` combines shares that are cut differently")
    return found


def _attended(operation: Operation, out: torch.Tensor) -> Share | None:
    """Attention with sharded heads or samples; keys and values may have fewer heads."""
    query = operation.arguments["query"]
    shares = [operation.share(name) for name in ("query", "key", "value")]
    share = shares[0]
    if share is None or any(s is None or (s.dim, s.outer) != (share.dim, share.outer) for s in shares):
        raise Refused("attention takes queries, keys and values that are cut differently")
    if share.dim >= query.dim() - 2:
        raise _across(operation)
    back = share.dim - query.dim()
    if any(t.dim() >= -back and t.shape[back] != 1 for t in operation.wholes):
        raise Refused("the attention mask is one for each head, and every rank has it whole")
    return share if out.dim() > share.dim else None


def _normed(operation: Operation, out: torch.Tensor) -> Share:
    tensor, share = operation.first
    if share.dim >= tensor.dim() - len(operation.arguments["normalized_shape"]):
        raise _across(operation)
    return share


def _looked_up(operation: Operation, out: torch.Tensor) -> Share:
    """Rows of a table, which is whole, by their numbers."""
    share = operation.share("indices")
    if operation.share("weight") is not None or share is None:
        raise Refused("the rows of a table are shares")
    return share


def _indexed(operation: Operation, out: torch.Tensor) -> Share:
    """One index, of a tensor that is whole."""
    found = [(n, index) for n, index in enumerate(operation.arguments["indices"]) if index is not None]
    if len(found) != 1 or operation.share("self") is not None:
        raise _across(operation)
    share = operation.first[1]
    return share._replace(dim=share.dim + found[0][0])


def _gathered(operation: Operation, out: torch.Tensor) -> Share:
    share, dim = operation.share("index"), operation.arguments["dim"] % out.dim()
    if operation.share("self") is not None or share is None or share.dim != dim:
        raise _across(operation)
    return share


def _added_product(operation: Operation, out: torch.Tensor) -> Share:
    """A product of rows, which are a share, with a whole matrix; a vector is added to each row."""
    share = operation.share("mat1")
    added = operation.arguments["self"]
    if share is None or share.dim != 0 or len(operation.shares) > 1 or added.dim() > 1:
        raise _across(operation)
    return share


def _made_like(operation: Operation, out: torch.Tensor) -> None:
    """Tensors of sizes that are given; those that follow from the size of a share are seen by their shapes."""


_Rule = Callable[[Operation, "torch.Tensor"], "Share | None"]
# The default dim of operations with a dim.
_UNSAID = {"split": 0, "split_with_sizes": 0, "unbind": 0, "slice": 0, "glu": -1, "sort": -1, "topk": -1}
_BY_KIND: dict[_Rule, str] = {
    _aligned: "clone detach alias contiguous lift_fresh _to_copy copy_ fill_ gelu dropout native_dropout bernoulli "
    "bernoulli_ empty_like zeros_like ones_like full_like rand_like randn_like",
    _viewed: "view _unsafe_view reshape _reshape_alias unsqueeze squeeze",
    _moved: "transpose permute t",
    _expanded: "expand",
    _along: "_softmax _log_softmax _safe_softmax logsumexp linalg_vector_norm sum mean prod amax amin max min any all "
    "argmax argmin var std var_mean cumsum cumprod logcumsumexp sort topk flip roll glu split split_with_sizes unbind "
    "slice select",
    _joined: "cat stack",
    _product: "mm bmm",
    _attended: "_scaled_dot_product_flash_attention_for_cpu",
    _normed: "native_layer_norm _fused_rms_norm",
}
_RULES = {name: rule for rule, names in _BY_KIND.items() for name in names.split()}
_OF_PIECES: dict[str, _Rule] = {
    "embedding": _looked_up,
    "index": _indexed,
    "gather": _gathered,
    "addmm": _added_product,
    "new_zeros": _made_like,
    "new_ones": _made_like,
    "new_full": _made_like,
}
