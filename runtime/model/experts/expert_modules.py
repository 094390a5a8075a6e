"""A mixture of experts: a router picks some gated networks for each token, and their results are summed by weight
(Shazeer et al. 2017, arXiv:1701.06538).

Model: no token is dropped, unless experts have a `capacity`. The rows of all tokens are sorted by expert, and all
experts multiply in one grouped product (`torch.nn.functional.grouped_mm`). Parameters have the names and shapes of
`transformers`, so that its weights fit.

Contract: rows reach an expert in the order of the tokens, and the results of a token are summed in the order of its
experts' scores: both passes are deterministic. Each sorted row belongs to one pair of token and expert, so that its
gradient is read, not added.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dslc.runtime.model.experts.grouped_product import grouped_product

_SMALLEST_SUM = 1e-20  # as `transformers` guards the sum of the scores
_LESS_ROUNDING = 1 - 1e-12  # so that rounding takes no whole number beyond itself


class Router(nn.Module):
    """Picks `top_k` experts for each token, and weighs them.

    Scores are computed in float32, or in float64 if the tokens are. With a `rate`, a bias for each expert joins the
    scores for the choice, but not for the weights (Wang et al. 2024, arXiv:2408.15664); `ExpertBalance` changes it by
    the rate. `load` counts the tokens of each expert over the micro-batches of a step. It is a buffer, so that
    recomputation counts once.

    With a `capacity`, rows over it are dropped in training; `dropped_rows` counts these. `group` are the ranks of other
    tokens, which `ExpertBalance` sets.

    With a `factor`, a balance loss is added to the loss (Fedus et al. 2021, arXiv:2101.03961). `probability_sum` sums
    the tokens' probabilities of each expert. The gradient of the balance loss needs the counts of the global batch:
    `ExpertBalance` sets it before the backward pass. Passes without autograd that come first count in `load_ahead`.
    """

    load: Tensor
    e_score_correction_bias: Tensor | None
    probability_sum: Tensor | None
    load_ahead: Tensor | None
    dropped_rows: Tensor | None
    group: dist.ProcessGroup | None
    balance_gradient: Tensor | None  # of the probability of each expert, equal for all tokens
    scaled_gradient: Tensor | None  # the same, as a rank's losses are scaled

    def __init__(
        self,
        width: int,
        experts: int,
        top_k: int,
        score: str,
        normalize: bool,
        scale: float,
        rate: float | None,
        factor: float | None = None,
        capacity: float | None = None,
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.score = score
        self.normalize = normalize
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(experts, width))
        self.rate = rate
        self.register_buffer("e_score_correction_bias", None if rate is None else torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts, dtype=torch.int64), persistent=False)
        self.factor = factor
        self.register_buffer("probability_sum", None if factor is None else torch.zeros(experts), persistent=False)
        self.capacity = capacity
        self.register_buffer(
            "dropped_rows", None if capacity is None else torch.zeros(experts, dtype=torch.int64), persistent=False
        )
        self.group = None
        self.load_ahead = self.balance_gradient = self.scaled_gradient = None

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the experts of each token and their weights, both (tokens, top_k)."""
        logits = F.linear(tokens, self.weight)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        scored = logits.detach() if self.normalize and self.factor is None else logits  # nothing trains through scores
        scores = scored.to(dtype).sigmoid() if self.score == "sigmoid" else scored.softmax(-1, dtype=dtype)
        bias = self.e_score_correction_bias
        chosen = (scores if bias is None else scores + bias).detach().topk(self.top_k, -1).indices
        weights = self._normalized(logits, scores, chosen) if self.normalize else scores.gather(-1, chosen)
        weights = weights if self.scale == 1.0 else weights * self.scale
        if self.probability_sum is not None and self.training and torch.is_grad_enabled():
            probabilities = scores
            if self.score == "sigmoid":
                probabilities = scores / (scores.sum(-1, keepdim=True) + _SMALLEST_SUM)
            self.probability_sum.add_(probabilities.detach().sum(0))
            weights = _AddBalanceGradient.apply(weights, probabilities, self)  # type: ignore[no-untyped-call]
        return chosen, weights

    def count_within_capacity(self, counts: Tensor) -> Tensor:
        """Returns how many of its rows a rank keeps of each expert, given their `counts`.

        An expert takes `capacity` times its even share of the global batch's rows, the first ones: lower ranks'
        rows, then earlier tokens'. So the samples' order in the global batch decides, under any plan.
        """
        assert self.capacity is not None and self.dropped_rows is not None
        of_lower_ranks, total = torch.zeros_like(counts), counts.sum()
        if self.group is not None:
            gathered = counts.new_empty(self.group.size() * counts.shape[0])
            dist.all_gather_single(gathered, counts, group=self.group)
            by_rank = gathered.view(self.group.size(), -1)
            of_lower_ranks, total = by_rank[: self.group.rank()].sum(0), gathered.sum()
        most = (total.double() * self.capacity / counts.shape[0] * _LESS_ROUNDING).ceil().long()
        kept_counts = (most - of_lower_ranks).clamp(min=0).minimum(counts)
        self.dropped_rows.add_(counts - kept_counts)
        return kept_counts

    def _normalized(self, logits: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """Returns the scores of the chosen experts, divided by their sum for each token.

        It is the softmax of the scores' logarithms. As a quotient of softmax scores, the gradient of the experts that
        were not chosen would be rounding instead of 0, of which Adam or Lion makes whole steps.
        """
        picked = logits.gather(-1, chosen).to(scores.dtype)
        if self.score == "sigmoid":
            return F.logsigmoid(picked).softmax(-1)
        return picked.softmax(-1) + 0.0 * scores.detach().sum(-1, keepdim=True)  # nan if any logit is not finite

    def extra_repr(self) -> str:
        return f"experts={self.weight.shape[0]}, top_k={self.top_k}, score={self.score}"


class Experts(nn.Module):
    """The gated networks, each parameter stacked over the experts (on a rank of an expert axis, over its own)."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * hidden, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, hidden))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Returns the experts' results, (rows, width). `rows` are sorted by expert; `counts` has each one's number."""
        ends = counts.cumsum(0).to(torch.int32)
        gate, up = grouped_linear(rows, self.gate_up_proj, ends).chunk(2, -1)
        return grouped_linear(F.silu(gate) * up, self.down_proj, ends)

    def extra_repr(self) -> str:
        experts, width, hidden = self.down_proj.shape
        return f"experts={experts}, width={width}, hidden={hidden}"


IS_COMPILABLE = "is_compilable"  # the attribute of a module that says whether torch's compiler traces its passes
SortedWork = Callable[[Tensor, Tensor], Tensor]  # rows sorted by expert, and the rows of each expert: the results
Dispatch = Callable[[Experts, Tensor, Tensor], Tensor]


def dispatch_locally(experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
    """Returns the results of experts that are all on this rank."""
    result: Tensor = experts(rows, counts)
    return result


class WidthExchange:
    """The exchange of ranks that have a part of each expert's width inside: nothing, where a rank has all of it."""

    def gather_tokens(self, x: Tensor) -> Tensor:
        """Returns all tokens of the input."""
        return x

    def tokens_of_router(self, tokens: Tensor) -> Tensor:
        """Returns gathered tokens for the router."""
        return tokens

    def tokens_of_experts(self, tokens: Tensor) -> Tensor:
        """Returns gathered tokens for the experts."""
        return tokens

    def weights(self, weights: Tensor) -> Tensor:
        """Returns the weights of the experts' results."""
        return weights

    def sum_results(self, results: Tensor) -> Tensor:
        """Returns the output, from the weighted results for all tokens."""
        return results


class MixtureOfExperts(nn.Module):
    """A router and its experts over the last dim, with a gated network that sees every token if there is one.

    Parts: `gate`, `experts`, and `shared_experts` if there are any. `dispatch` may be replaced, for example by a
    function that sends rows to the ranks that hold their experts; it takes the experts, rows sorted by expert and the
    rows of each of all experts, and returns a result for each row in the same order. So may `exchange`, for experts of
    which ranks have a part of the width inside.
    """

    gate: Router
    experts: Experts
    shared_experts: nn.Module | None
    dispatch: Dispatch
    exchange: WidthExchange

    def __init__(self) -> None:
        super().__init__()
        self.dispatch = dispatch_locally
        self.exchange = WidthExchange()
        for part in ("gate", "experts", "shared_experts"):
            self.register_module(part, None)  # fixes their order, and so that of the parameters

    @property
    def is_compilable(self) -> bool:
        """True if torch's compiler traces its passes: nothing is exchanged in them, or depends on the global batch."""
        is_local = self.dispatch is dispatch_locally and type(self.exchange) is WidthExchange
        return is_local and self.gate.probability_sum is None and self.gate.capacity is None

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.exchange.gather_tokens(x)
        chosen, weights = self.gate(self.exchange.tokens_of_router(tokens).flatten(0, -2))
        weights = self.exchange.weights(weights)
        pairs = chosen.flatten()
        counts = torch.zeros_like(self.gate.load).scatter_add_(0, pairs, torch.ones_like(pairs))
        if self.training and torch.is_grad_enabled():
            self.gate.load.add_(counts)
        elif self.training and self.gate.load_ahead is not None:
            self.gate.load_ahead.add_(counts)
        rows = self.exchange.tokens_of_experts(cast_for_product(tokens)).flatten(0, -2)
        work: SortedWork = functools.partial(self.dispatch, self.experts)
        if self.gate.capacity is not None and self.training and torch.is_grad_enabled():
            work = functools.partial(_work_within, self.gate, work)
        results = results_of_pairs(rows, chosen, counts, work)
        out = _SumByWeight.apply(weights.to(results.dtype), results)  # type: ignore[no-untyped-call]
        out = self.exchange.sum_results(out.view(*tokens.shape))
        return out if self.shared_experts is None else out + self.shared_experts(x)


def results_of_pairs(tokens: Tensor, chosen: Tensor, counts: Tensor, work: SortedWork) -> Tensor:
    """Returns the results of each token's experts, (tokens, top_k, width). `chosen` (tokens, top_k) are these experts,
    `counts` the rows of each expert, and `work` computes the results of sorted rows.
    """
    order = chosen.flatten().argsort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    # No variable holds the sorted rows when the work is done.
    results = work(_SortRows.apply(tokens, order, places, chosen.shape[1]), counts)  # type: ignore[no-untyped-call]
    of_pairs: Tensor = restore_rows(results, order, places).unflatten(0, chosen.shape)
    return of_pairs


def restore_rows(rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Returns the rows `places` of rows that were sorted by `order`; each of both is the inverse of the other."""
    restored: Tensor = _RestoreRows.apply(rows, order, places)  # type: ignore[no-untyped-call]
    return restored


def _work_within(router: Router, work: SortedWork, rows: Tensor, counts: Tensor) -> Tensor:
    """Returns the results of sorted rows; those over the capacity of their expert are zeros."""
    kept_counts = router.count_within_capacity(counts)
    numbers = torch.arange(rows.shape[0], device=rows.device)
    starts, experts = counts.cumsum(0) - counts, torch.repeat_interleave(counts)
    places = (numbers - starts[experts] < kept_counts[experts]).nonzero().squeeze(1)
    results = work(rows.index_select(0, places), kept_counts)
    return results.new_zeros(rows.shape[0], results.shape[1]).index_copy(0, places, results)


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Returns each row times the transposed matrix of its expert. In float64, which torch's grouped product refuses,
    experts multiply one after another.
    """
    if rows.dtype == torch.float64:
        products = zip(rows.tensor_split(ends[:-1].long().cpu()), weight, strict=True)
        return torch.cat([own @ matrix.T for own, matrix in products])
    return grouped_product(cast_for_product(rows), cast_for_product(weight), ends)


def cast_for_product(x: Tensor) -> Tensor:
    """Returns `x` as autocast passes it to a product; autocast does not know grouped products."""
    device = x.device.type
    has_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return x.to(torch.get_autocast_dtype(device)) if has_autocast else x


class _AddBalanceGradient(torch.autograd.Function):
    """Passes the weights of experts on. Its backward pass adds the gradient of the balance loss to that of the
    probabilities, as Megatron's `MoEAuxLossAutoScaler` does.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, probabilities: Tensor, router: Router) -> Tensor:
        ctx.router, ctx.shape, ctx.dtype = router, probabilities.shape, probabilities.dtype
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (gradient,), added = gradients, ctx.router.scaled_gradient
        return gradient, None if added is None else added.to(ctx.dtype).expand(ctx.shape), None


class _SortRows(torch.autograd.Function):
    """Copies each token once for each of its experts, sorted by expert."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, places: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.top_k = top_k
        return tokens.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (places,), (gradient,) = ctx.saved_tensors, gradients
        return gradient.index_select(0, places).unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None


class _RestoreRows(torch.autograd.Function):
    """Puts rows that were sorted by expert back into the order of the tokens."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (order,), (gradient,) = ctx.saved_tensors, gradients
        return gradient.index_select(0, order), None, None


class _SumByWeight(torch.autograd.Function):
    """Sums each token's results (tokens, top_k, width) by weight (tokens, top_k), one place after another.

    A batched product is six times slower on a CPU: its matrices have a row for each token. 16 bits are summed in
    float32, as a product does.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, results: Tensor) -> Tensor:
        ctx.save_for_backward(
            weights if ctx.needs_input_grad[1] else None, results if ctx.needs_input_grad[0] else None
        )
        wide = torch.promote_types(results.dtype, torch.float32)
        summed = results[:, 0].to(wide) * weights[:, :1].to(wide)
        for place in range(1, results.shape[1]):
            summed.addcmul_(results[:, place].to(wide), weights[:, place : place + 1].to(wide))
        return summed.to(results.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (weights, results), (gradient,) = ctx.saved_tensors, gradients
        of_weights = of_results = None
        if results is not None:
            wide = torch.promote_types(results.dtype, torch.float32)
            sums = [(results[:, place].to(wide) * gradient).sum(-1) for place in range(results.shape[1])]
            of_weights = torch.stack(sums, 1).to(results.dtype)
        if weights is not None:
            of_results = gradient.unsqueeze(1) * weights.unsqueeze(-1)
        return of_weights, of_results
