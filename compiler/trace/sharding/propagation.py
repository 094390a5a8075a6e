"""Propagates shares through operations: if a rank has one of equal pieces of a tensor, which piece of the result does
it have?

Model: a share lies along one dim of its tensor, which is `outer` x `size` x the rest, and its pieces are equal parts of
`size`. The outer part is, for example, samples joined with the heads for a product, or queries, keys and values beside
one another. The rest is the size of a head in the row that follows. If parts that lie side by side have unequal sizes,
as where keys have fewer heads, `parts` has these sizes, and each part is cut. Rules are by the names of torch's
operations below autograd (`aten`), as they come when a module runs.

Contract: `follow` returns the share that the result is, as if it had been computed from the whole; it raises
`ShareError` for an operation that works across the pieces, or is not known. The shapes describe the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd, prod
from typing import NamedTuple

import torch

from dslc.compiler.trace.private_torch import Argument, Arguments, Operator, Options, schema_of
from dslc.compiler.trace.run import TensorMap, tensors_of


class TensorShare(NamedTuple):
    """A share along `dim`, of size `outer` x `size` x the rest: each rank has an equal part of `size`. With `parts` the
    dim consists of parts of these sizes, and a rank has an equal piece of each part; `outer` is 1, `size` the whole.
    """

    dim: int
    outer: int
    size: int
    parts: tuple[int, ...] = ()

    def divides_into(self, ranks: int) -> bool:
        """Returns whether `ranks` equal pieces can be made."""
        return all(size % ranks == 0 for size in self.parts or (self.size,))


def share_of_parts(dim: int, sizes: Sequence[int]) -> TensorShare:
    """Returns the share of parts that lie side by side along `dim`."""
    if len(set(sizes)) == 1:
        return TensorShare(dim, len(sizes), sizes[0])
    return TensorShare(dim, 1, sum(sizes), tuple(sizes))


def start_of(tensor: torch.Tensor, view: torch.Tensor, dim: int) -> int:
    """Returns where `view`, a slice of `tensor` along `dim`, begins."""
    return (int(view.storage_offset()) - int(tensor.storage_offset())) // max(1, int(tensor.stride(dim)))


class ShareError(Exception):
    """Why a plan cannot be used, in one line; the module, and the remedy."""

    def __init__(self, text: str, module: str = "", help: str = "") -> None:
        super().__init__(text)
        self.text, self.module, self.help = text, module, help


class TensorOperation:
    """A call of one of torch's operations, its arguments by name, and the shares among them."""

    def __init__(self, func: Operator, args: Arguments, kwargs: Options, shares: TensorMap[TensorShare]) -> None:
        self.name = schema_of(func).name.removeprefix("aten::")
        self.pointwise = torch.Tag.pointwise in func.tags
        self.arguments: dict[str, Argument] = {
            a.name: v for a, v in zip(schema_of(func).arguments, args, strict=False)
        } | dict(kwargs)
        self._shares = shares
        tensors = tensors_of((args, kwargs))
        self.shares = [(tensor, share) for tensor in tensors if (share := shares.get(tensor)) is not None]
        self.wholes = [tensor for tensor in tensors if tensor not in shares]

    def share(self, name: str) -> TensorShare | None:
        return self._shares.get(self.arguments.get(name))

    @property
    def first_share(self) -> tuple[torch.Tensor, TensorShare]:
        return self.shares[0]


def follow(operation: TensorOperation, out: torch.Tensor) -> TensorShare | None:
    """Returns the share that `out`, a result of an operation on a share, is; None: whole."""
    rule: _Rule | None = _aligned if operation.pointwise else _RULES.get(operation.name)
    if rule is None:
        raise ShareError(f"dslc does not know the result of `{operation.name}` on shares")
    return rule(operation, out)


def _across(operation: TensorOperation) -> ShareError:
    tensor, share = operation.first_share
    return ShareError(
        f"`{operation.name}` works across dim {share.dim} of {tuple(tensor.shape)}, of which ranks have shares"
    )


def _common(shares: Sequence[TensorShare | None]) -> TensorShare | None:
    """Returns the share that all of these are, of dims of one size; None if they are cut differently. Heads that are
    repeated for several queries are fewer units in the same places.
    """
    first = shares[0]
    if first is None or any(s is None or s._replace(size=first.size) != first for s in shares):
        return None
    return first._replace(size=gcd(*(s.size for s in shares if s is not None)))


def _aligned(operation: TensorOperation, out: torch.Tensor) -> TensorShare:
    """Elementwise operations, dims aligned at the end."""
    share = _common([s._replace(dim=s.dim + out.dim() - t.dim()) for t, s in operation.shares])
    if share is None or any(t.shape[s.dim] != out.shape[share.dim] for t, s in operation.shares):
        raise ShareError(f"`{operation.name}` combines shares that are cut differently")
    back = share.dim - out.dim()
    if any(t.dim() >= -back and t.shape[back] != 1 for t in operation.wholes):
        raise ShareError(f"`{operation.name}` combines a share with a tensor that every rank has whole")
    return share


def _viewed(operation: TensorOperation, out: torch.Tensor) -> TensorShare:
    """Views: the same numbers in the same order under another shape."""
    tensor, share = operation.first_share
    if share.parts:
        return _share_of_view(operation, out)
    left, before = prod(tensor.shape[: share.dim]) * share.outer, 1
    for dim, size in enumerate(out.shape):
        if before * size > left:
            outer = left // before
            rest = size // outer
            fits = left % before == 0 and size % outer == 0 and (rest % share.size == 0 or share.size % rest == 0)
            if not fits:
                break
            return TensorShare(dim, outer, min(rest, share.size))
        before *= size
    raise ShareError(f"the shares of {tuple(tensor.shape)} are none of {tuple(out.shape)}")


def _share_of_view(operation: TensorOperation, out: torch.Tensor) -> TensorShare:
    """Views that leave the dim of the share as it is."""
    tensor, share = operation.first_share
    size, before = tensor.shape[share.dim], prod(tensor.shape[: share.dim])
    dims = (dim for dim, other in enumerate(out.shape) if other == size and prod(out.shape[:dim]) == before)
    dim = next(dims, None)
    if dim is None:
        raise ShareError(f"parts of {share.parts} that lie side by side are joined or cut by a view of them as one")
    return share._replace(dim=dim)


def _moved(operation: TensorOperation, out: torch.Tensor) -> TensorShare:
    tensor, share = operation.first_share
    order = list(range(tensor.dim()))
    if operation.name == "permute":
        order = [dim % tensor.dim() for dim in operation.arguments["dims"]]
    else:
        one, other = (operation.arguments.get(name, n) for n, name in enumerate(("dim0", "dim1")))
        order[one], order[other] = order[other], order[one]
    return share._replace(dim=order.index(share.dim))


def _expanded(operation: TensorOperation, out: torch.Tensor) -> TensorShare:
    tensor, share = operation.first_share
    return share._replace(dim=share.dim + out.dim() - tensor.dim())


def _along(operation: TensorOperation, out: torch.Tensor) -> TensorShare:
    """Operations along one dim or several, which may not be the dim of the share."""
    tensor, share = operation.first_share
    given = operation.arguments.get("dim", operation.arguments.get("dims", _UNSAID.get(operation.name)))
    dims = [given] if isinstance(given, int) else list(given or range(tensor.dim()))
    dims = [dim % tensor.dim() for dim in dims]
    if share.dim in dims:
        if operation.name not in CUTS or operation.arguments.get("step", 1) != 1:
            raise _across(operation)
        return _some_parts(operation, out)
    lost = tensor.dim() - out.dim()
    return share._replace(dim=share.dim - (sum(dim < share.dim for dim in dims) if lost else 0))


def _some_parts(operation: TensorOperation, out: torch.Tensor) -> TensorShare:
    """A slice along the share's dim: it takes some of the parts that lie side by side there."""
    tensor, share = operation.first_share
    if out.shape == tensor.shape:
        return share
    sizes = share.parts or (tensor.shape[share.dim] // share.outer,) * share.outer
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    start = start_of(tensor, out, share.dim)
    end = start + out.shape[share.dim]
    if end == start or {start, end} - {0, *ends}:
        raise _across(operation)
    taken = [size for size, last in zip(sizes, ends, strict=True) if start < last <= end]
    return share_of_parts(share.dim, taken) if share.parts else share._replace(outer=len(taken))


def _share_of_concatenation(operation: TensorOperation, out: torch.Tensor) -> TensorShare:
    share = operation.first_share[1]
    stacks = operation.name == "stack"
    dim = operation.arguments.get("dim", 0) % out.dim()
    if operation.wholes or any(other != share for _, other in operation.shares):
        raise ShareError(f"`{operation.name}` joins a share with a tensor that is none, or is cut differently")
    if not stacks and dim == share.dim:
        raise _across(operation)
    return share._replace(dim=share.dim + (stacks and dim <= share.dim))


_DISTANCES = ("_euclidean_dist", "_cdist_forward")
_FACTORS = {"mm": ("self", "mat2"), "addmm": ("mat1", "mat2"), "mv": ("self", "vec"), "addmv": ("mat", "vec")}
_FACTORS |= {"bmm": ("self", "mat2"), "baddbmm": ("batch1", "batch2")} | dict.fromkeys(_DISTANCES, ("x1", "x2"))


def _product(operation: TensorOperation, out: torch.Tensor) -> TensorShare:
    """Matrix products with at least one factor that is a share, not along the summed dim; what is added fits it."""
    first, second = (operation.arguments[name] for name in _FACTORS[operation.name])
    a, b = (operation.share(name) for name in _FACTORS[operation.name])
    rows, last = first.dim() - 2, first.dim() - 1
    if b and operation.name in _DISTANCES:  # of each row of the first to each of the second
        b = b._replace(dim={rows: last, last: rows}.get(b.dim, b.dim))
    if (a and a.dim == last) or (b and b.dim == (rows if second.dim() > 1 else 0)):
        raise _across(operation)
    found = a or b
    if found is not None and found.dim < rows:  # in a batch of matrices both factors have the share, else one of them
        found = _common([a, b])
    elif a and b:
        found = None
    if found is None:
        raise ShareError(f"`{operation.name}` combines shares that are cut differently")
    if operation.name.startswith(("add", "badd")):
        _check_added(operation, found, out)
    return found


def _check_added(operation: TensorOperation, share: TensorShare, out: torch.Tensor) -> None:
    """Checks that the tensor that is added to a product has the product's share, or is the same all along it."""
    added, own = operation.arguments["self"], operation.share("self")
    dim = share.dim - out.dim() + added.dim()
    if own is None:
        fits = dim < 0 or added.shape[dim] == 1
    else:
        fits = own == share._replace(dim=dim)
    if not fits:
        raise ShareError(f"`{operation.name}` adds to a share what is cut differently")


def _attended(operation: TensorOperation, out: torch.Tensor) -> TensorShare | None:
    """Attention with sharded heads or samples; keys and values may have fewer heads."""
    query = operation.arguments["query"]
    shares = [operation.share(name) for name in ("query", "key", "value")]
    share = shares[0]
    if share is None or any(s is None or (s.dim, s.outer) != (share.dim, share.outer) for s in shares):
        raise ShareError("attention takes queries, keys and values that are cut differently")
    if share.dim >= query.dim() - 2:
        raise _across(operation)
    back = share.dim - query.dim()
    if any(t.dim() >= -back and t.shape[back] != 1 for t in operation.wholes):
        raise ShareError("the attention mask is one for each head, and every rank has it whole")
    return share if out.dim() > share.dim else None


def _normed(operation: TensorOperation, out: torch.Tensor) -> TensorShare:
    tensor, share = operation.first_share
    if share.dim >= tensor.dim() - len(operation.arguments["normalized_shape"]):
        raise _across(operation)
    return share


def _compared(operation: TensorOperation, out: torch.Tensor) -> TensorShare | None:
    """A loss for each number."""
    if operation.arguments["reduction"] != 0:
        raise _across(operation)
    return _aligned(operation, out)


def _classified(operation: TensorOperation, out: torch.Tensor) -> TensorShare | None:
    """A loss for each target, of scores with the classes in their second dim."""
    scores, targets = operation.share("self"), operation.share("target")
    if operation.arguments["reduction"] != 0 or scores is None or scores.dim == 1:
        raise _across(operation)
    share = scores._replace(dim=max(0, scores.dim - 1))
    if _common([share, targets]) is None:
        raise ShareError(f"`{operation.name}` combines shares that are cut differently")
    return share if out.dim() else None  # beside the losses it gives the sum of their weights


def _looked_up(operation: TensorOperation, out: torch.Tensor) -> TensorShare:
    """Rows of a table, which is whole, by their numbers."""
    share = operation.share("indices")
    if operation.share("weight") is not None or share is None:
        raise ShareError("the rows of a table are shares")
    return share


def _indexed(operation: TensorOperation, out: torch.Tensor) -> TensorShare:
    """One index that is a share, of a tensor that is whole; or a share, by indices of its other dims."""
    indices = operation.arguments["indices"]
    dims = [n for n, index in enumerate(indices) if index is not None]
    if any(str(indices[n].dtype) == "torch.bool" for n in dims):
        raise _across(operation)
    share = operation.share("self")
    if share is None:
        if len(dims) != 1:
            raise _across(operation)
        share = operation.first_share[1]
        return share._replace(dim=share.dim + dims[0])
    if share.dim in dims or len(operation.shares) > 1:
        raise _across(operation)
    new = max(indices[n].dim() for n in dims)
    together = dims == list(range(dims[0], dims[-1] + 1))
    before = sum(n not in dims for n in range(share.dim))
    after = not together or dims[0] < share.dim
    return share._replace(dim=before + (new if after else 0))


def _selected(operation: TensorOperation, out: torch.Tensor) -> TensorShare:
    """Entries along one dim by their numbers; the tensor or the numbers are a share."""
    share, dim = operation.share("self"), operation.arguments["dim"] % out.dim()
    if share is None:
        return operation.first_share[1]._replace(dim=dim)
    if share.dim == dim or len(operation.shares) > 1:
        raise _across(operation)
    return share


def _gathered(operation: TensorOperation, out: torch.Tensor) -> TensorShare:
    share, dim = operation.share("index"), operation.arguments["dim"] % out.dim()
    own = operation.share("self")
    if share is None or (share.dim != dim if own is None else own != share or share.dim == dim):
        raise _across(operation)
    if own is not None and operation.arguments["self"].shape[share.dim] != out.shape[share.dim]:
        raise _across(operation)
    return share


def _scattered(operation: TensorOperation, out: torch.Tensor) -> TensorShare:
    """Writes along one dim, by numbers that say where; all that has the dim of the share has the share."""
    share, dim = operation.first_share[1], operation.arguments["dim"] % out.dim()
    names = ("index", "src", "source") if operation.name.startswith("scatter") else ("src", "source")
    tensors = [("self", out)] + [(n, operation.arguments[n]) for n in names if n in operation.arguments]
    given = [(name, tensor) for name, tensor in tensors if hasattr(tensor, "dim")]
    if share.dim == dim or any(
        operation.share(name) != share or tensor.shape[share.dim] != out.shape[share.dim] for name, tensor in given
    ):
        raise _across(operation)
    if len(operation.shares) != len(given):
        raise ShareError(f"`{operation.name}` combines shares that are cut differently")
    return share


def _made_like(operation: TensorOperation, out: torch.Tensor) -> TensorShare | None:
    """Tensors of one number and of given sizes. Of the share's shape, the tensor is a share too. Sizes that follow from
    a share's size in another way are seen by the shapes of the tensors.
    """
    tensor, share = operation.first_share
    return share if out.shape == tensor.shape else None


def _complex(operation: TensorOperation, out: torch.Tensor) -> TensorShare:
    """Pairs of numbers in the last dim as complex ones, and these as pairs."""
    share = operation.first_share[1]
    if share.dim >= out.dim():
        raise _across(operation)
    return share


def _repeated(operation: TensorOperation, out: torch.Tensor) -> TensorShare:
    tensor, share = operation.first_share
    dim = share.dim + out.dim() - tensor.dim()
    times = operation.arguments["repeats"][dim]
    if times < 1:
        raise _across(operation)
    if share.parts:
        return share_of_parts(dim, share.parts * times)
    return share._replace(dim=dim, outer=share.outer * times)


def _leading_dims_rule(count: int) -> _Rule:
    """Returns the rule of operations that work on the last `count` dims."""

    def rule(operation: TensorOperation, out: torch.Tensor) -> TensorShare:
        tensor, share = operation.first_share
        if share.dim >= tensor.dim() - count or operation.wholes or len(operation.shares) > 1:
            raise _across(operation)
        return share

    return rule


def _padded(operation: TensorOperation, out: torch.Tensor) -> TensorShare:
    """Padding of the last dims, two numbers each; the share's has none."""
    tensor, share = operation.first_share
    place = 2 * (tensor.dim() - 1 - share.dim)
    if any(operation.arguments["pad"][place : place + 2]):
        raise _across(operation)
    return share


def _windowed(operation: TensorOperation, out: torch.Tensor) -> TensorShare:
    """Windows along a dim, which may not be the dim of the share."""
    tensor, share = operation.first_share
    if operation.arguments["dimension"] % tensor.dim() == share.dim:
        raise _across(operation)
    return share


def _diagonal(operation: TensorOperation, out: torch.Tensor) -> TensorShare:
    tensor, share = operation.first_share
    dims = [operation.arguments.get(name, n) % tensor.dim() for n, name in enumerate(("dim1", "dim2"))]
    if share.dim in dims:
        raise _across(operation)
    return share._replace(dim=share.dim - sum(dim < share.dim for dim in dims))


def _convolved(operation: TensorOperation, out: torch.Tensor) -> TensorShare:
    """Convolutions of samples, or with a window of one number, which works on each position by itself."""
    tensor, share = operation.first_share
    weight, dim = operation.arguments["weight"], share.dim
    if operation.share("input") is None or len(operation.shares) > 1:
        raise _across(operation)
    steps = [list(operation.arguments[name]) for name in ("stride", "padding")]
    stride, padding = (list(each) * (tensor.dim() - 2) if len(each) == 1 else list(each) for each in steps)
    alone = dim > 1 and weight.shape[dim] == 1 and (stride[dim - 2], padding[dim - 2]) == (1, 0)
    if dim and (not alone or operation.arguments["transposed"]):
        raise _across(operation)
    return share


def _sought(operation: TensorOperation, out: torch.Tensor) -> TensorShare:
    """Compares each number with the numbers of a tensor that is whole."""
    share = operation.share("elements" if operation.name == "isin" else "self")
    if (
        share is None
        or len(operation.shares) > 1
        or (operation.name == "searchsorted" and operation.wholes[0].dim() > 1)
    ):
        raise _across(operation)
    return share


_Rule = Callable[[TensorOperation, "torch.Tensor"], "TensorShare | None"]
CUTS = ("slice", "split", "split_with_sizes")  # views that begin somewhere along a dim
# The default dim of operations with a dim.
_UNSAID = {"glu": -1, "sort": -1, "topk": -1, "kthvalue": -1, "mode": -1} | dict.fromkeys((*CUTS, "unbind"), 0)
_BY_KIND: dict[_Rule, str] = {
    _aligned: "clone detach alias contiguous lift_fresh lift_fresh_copy _to_copy copy_ fill_ zero_ masked_fill_ gelu "
    "dropout native_dropout bernoulli bernoulli_ normal_ uniform_ exponential_ empty_like zeros_like ones_like "
    "full_like rand_like randn_like polar complex _conj _neg_view hardswish _prelu_kernel log_sigmoid_forward "
    "floor_divide",
    _viewed: "view _unsafe_view reshape _reshape_alias unsqueeze squeeze",
    _moved: "transpose permute t",
    _expanded: "expand",
    _along: "_softmax _log_softmax _safe_softmax logsumexp linalg_vector_norm sum mean prod amax amin max min any all "
    "argmax argmin var std var_mean cumsum cumprod logcumsumexp cummax cummin sort topk kthvalue mode median nansum "
    "count_nonzero flip roll glu split split_with_sizes unbind slice select _fft_r2c _fft_c2r _fft_c2c",
    _share_of_concatenation: "cat stack",
    _product: " ".join(_FACTORS),
    _attended: "_scaled_dot_product_flash_attention_for_cpu",
    _normed: "native_layer_norm _fused_rms_norm",
    _compared: "mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits",
    _classified: "nll_loss_forward nll_loss2d_forward",
    _looked_up: "embedding",
    _indexed: "index _unsafe_index",
    _selected: "index_select",
    _gathered: "gather",
    _scattered: "scatter scatter_ scatter_add scatter_add_ scatter_reduce index_add index_add_ index_copy index_fill",
    _made_like: "new_zeros new_ones new_full new_empty",
    _complex: "view_as_complex view_as_real",
    _repeated: "repeat",
    _leading_dims_rule(1): "avg_pool1d reflection_pad1d replication_pad1d max_pool1d_with_indices",
    _leading_dims_rule(2): "tril triu avg_pool2d _adaptive_avg_pool2d max_pool2d_with_indices reflection_pad2d "
    "replication_pad2d upsample_nearest2d upsample_bilinear2d linalg_inv_ex linalg_cholesky_ex linalg_matrix_exp",
    _leading_dims_rule(3): "pixel_shuffle pixel_unshuffle",
    _padded: "constant_pad_nd",
    _windowed: "unfold",
    _diagonal: "diagonal",
    _convolved: "convolution",
    _sought: "isin bucketize searchsorted",
}
_RULES = {name: rule for rule, names in _BY_KIND.items() for name in names.split()}


_SUMS = (
    *("sum", "mean", "nll_loss_forward", "mse_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)


def sums_positions(operation: TensorOperation, made: Sequence[torch.Tensor]) -> bool:
    """True if an operation makes one number of all positions: a sum, a mean, or a loss that is one of them."""
    if operation.name not in _SUMS or any(tensor.dim() for tensor in made):
        return False
    shares = [share for _, share in operation.shares]
    return all(share == shares[0] for share in shares) and (len(shares) == 1 or operation.name not in ("sum", "mean"))
