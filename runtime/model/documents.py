"""Documents in one sequence: attention and positions that stay within each.

Model: a token ends a document. Attention sees the positions of its own document alone, and learned positions begin anew
with each. Rotary positions depend on the distance alone. A network of `transformers` gets the positions as
`position_ids`, and its attention by an implementation that is registered with the library's attention interface.

Attention takes one of three ways, which the plan knows (`masks_documents`):
    kernel      on a CPU, torch's flash kernel runs for each document and writes into one output; nothing is masked
    varlen      on a GPU in 16 bits, `torch.nn.attention.varlen` runs over all documents at once
    mask        elsewhere, the pairs of positions of different documents are masked; all layers of a pass share the mask

Contract: `apply` changes modules in place; names and parameters stay. The output at a position, and its gradient, are
the same as for its document alone, except for rounding. Without a mask, attention keeps the bytes that causal attention
over the whole sequence keeps, and computes the documents' products alone.

A stage of a pipeline, and a rank with a piece of each sequence, is given the tokens of the whole sequences besides
(`see`). Over the context axis a rank's queries meet the keys of all pieces under a mask (context_parallel.py). A module
that is run again, for its gradient, meets the documents of its first pass (recompute.py). While the calls of a network
of `transformers` are recorded for stages, two functions stand for attention and positions (`stand_in_calls`).

Limits: the host reads where documents end, for which it waits on a GPU, and torch.compile leaves attention out, which
selective recomputation does not go with. The kernel of a GPU has not run here.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from dslc.compiler.trace import private_torch
from dslc.runtime.model.errors import ModelError
from dslc.runtime.model.llama_modules import GroupedAttention
from dslc.runtime.model.modules import Attention, PositionalEmbedding

ATTENTION = "dslc_documents"  # name of the implementation in the library
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")  # what else changes the scores of attention


class DocumentRange(NamedTuple):
    """A document in a row of the batch: its positions from `first` up to `end`."""

    row: int
    first: int
    end: int

    @property
    def length(self) -> int:
        """The number of its positions."""
        return self.end - self.first

    @property
    def place(self) -> tuple[slice, slice, slice]:
        """Its part of a tensor (batch, heads, length, …)."""
        return slice(self.row, self.row + 1), slice(None), slice(self.first, self.end)


class InputDocuments:
    """The documents of an input, int64 of shape (batch, length): `token` ends one. `places` are positions within them.

    Of the pieces of a context axis the input is the whole sequence, and `places` are of piece `piece` of `pieces`.
    """

    def __init__(self, tokens: Tensor, token: int, piece: int = 0, pieces: int = 1) -> None:
        ends = tokens == token
        self._numbers = ends.cumsum(1) - ends.long()  # a token that ends a document belongs to it
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        begins = F.pad(ends[:, :-1], (1, 0), value=True)
        places = positions - torch.where(begins, positions, 0).cummax(1).values
        own = tokens.shape[1] // pieces
        self.places = places[:, piece * own : (piece + 1) * own]
        self._masks: dict[tuple[object, ...], Tensor] = {}
        self._ranges: list[DocumentRange] | None = None
        self._bounds: Tensor | None = None

    @property
    def ranges(self) -> list[DocumentRange]:
        """The documents of the batch in order."""
        if self._ranges is None:
            self._ranges = []
            for row, numbers in enumerate(self._numbers.tolist()):
                first = 0
                for end in range(1, len(numbers) + 1):
                    if end == len(numbers) or numbers[end] != numbers[first]:
                        self._ranges.append(DocumentRange(row, first, end))
                        first = end
        return self._ranges

    def bounds(self, length: int, device: torch.device) -> Tensor:
        """Returns the first position of each document, and the end, of all rows one after another."""
        if self._bounds is None:
            ends = [document.row * length + document.end for document in self.ranges]
            self._bounds = torch.tensor([0, *ends], dtype=torch.int32, device=device)
        return self._bounds

    @torch.no_grad()
    def mask(self, dtype: torch.dtype, causal: bool, window: int | None, first: int = 0, length: int = 0) -> Tensor:
        """Returns 0 where a query sees a key, else minus infinity: (batch, 1, queries, keys). The queries are `length`
        positions from `first` on, by default all; keys after the last query are left out under a causal mask.
        """
        kind = (dtype, causal, window)
        if kind not in self._masks:
            numbers = self._numbers
            end = first + (length or numbers.shape[1])
            seen = numbers[:, :end] if causal else numbers
            positions, queries = torch.arange(seen.shape[1], device=numbers.device), slice(first, end)
            places = torch.arange(first, end, device=numbers.device)[:, None]
            same_document = numbers[:, queries, None] == seen[:, None, :]
            if causal:
                same_document &= positions <= places
            if window is not None:
                same_document &= positions > places - window
            mask = torch.zeros(same_document.shape, dtype=dtype, device=same_document.device)
            self._masks[kind] = mask.masked_fill_(~same_document, float("-inf"))[:, None]
        return self._masks[kind]


class Documents:
    """The documents of the input that the model is run with, `now`; `masks` if attention takes a mask wherever it runs.

    `piece` is the number of this rank's piece of a sequence, of `pieces`.
    """

    now: InputDocuments

    def __init__(self, token: int, *, masks: bool = False, piece: int = 0, pieces: int = 1) -> None:
        self._token, self._is_masked, self._piece, self._pieces = token, masks, piece, pieces

        self.is_recorded = False  # the network's calls are being recorded, to be run by stages

    def see(self, tokens: Tensor) -> None:
        """Takes an input, int64 of shape (batch, length), of whole sequences."""
        self.now = InputDocuments(tokens, self._token, self._piece, self._pieces)

    @property
    def places(self) -> Tensor:
        """The position of each token in its document."""
        return self.now.places

    @contextlib.contextmanager
    def revisit(self, seen: InputDocuments, within: contextlib.AbstractContextManager[object]) -> Iterator[None]:
        """Goes back to an earlier input while the context lasts."""
        later, self.now = self.now, seen
        try:
            with within:
                yield
        finally:
            self.now = later

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool,
        window: int | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Returns attention within documents; all are (batch, heads, length, head_dim)."""
        query, key, value = cast_operands(query, key, value)
        device = query.device.type
        if not self._is_masked and dropout == 0 and query.shape[-1] == value.shape[-1]:
            longest = max(document.length for document in self.now.ranges)
            if device == "cpu" and (window is None or window >= longest):
                output: Tensor = _KernelAttention.apply(  # type: ignore[no-untyped-call]
                    query, key, value, self.now.ranges, is_causal, scale
                )
                return output
            if device == "cuda" and query.dtype in (torch.float16, torch.bfloat16) and (is_causal or window is None):
                return self._varlen(query, key, value, is_causal, window, scale, longest)
        mask = self.now.mask(query.dtype, is_causal, window)
        grouped = key.shape[1] != query.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=grouped
        )

    def _varlen(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool,
        window: int | None,
        scale: float | None,
        longest: int,
    ) -> Tensor:
        """Returns attention of a GPU over the documents of all rows, one after another."""
        from torch.nn.attention.varlen import varlen_attn

        batch, heads, length, _ = query.shape
        queries, keys, values = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
        bounds, sees = self.now.bounds(length, query.device), (-1, -1)
        if is_causal:
            sees = (window - 1 if window else -1, 0)
        grouped = key.shape[1] != heads
        output: Any = varlen_attn(
            queries, keys, values, bounds, bounds, longest, longest, scale=scale, window_size=sees, enable_gqa=grouped
        )
        attended: Tensor = output.unflatten(0, (batch, length)).transpose(1, 2)
        return attended


class _KernelContext(FunctionCtx):
    saved_tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # query, key, value, output, sums
    call: tuple[list[DocumentRange], bool, float | None]


class _KernelAttention(torch.autograd.Function):
    """Attention by torch's flash kernel for CPUs, document by document, into one output. It keeps what the kernel keeps
    of a whole sequence. A document of one position attends to itself alone: its output is its value.
    """

    @staticmethod
    def forward(
        ctx: _KernelContext,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ranges: list[DocumentRange],
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        output = torch.empty_like(query)
        wide = torch.promote_types(query.dtype, torch.float32)
        sums = torch.empty(query.shape[0], query.shape[2], query.shape[1], dtype=wide).transpose(1, 2)
        rows, places = _single_positions(ranges)
        output[rows, :, places] = value[rows, :, places].repeat_interleave(query.shape[1] // value.shape[1], 1)
        for place in (document.place for document in ranges if document.length > 1):
            output[place], sums[place] = private_torch.flash_attention_on_cpu(
                query[place], key[place], value[place], 0.0, is_causal, scale=scale
            )
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.call = ranges, is_causal, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: _KernelContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        ranges, is_causal, scale = ctx.call
        gradients = [torch.empty_like(tensor.transpose(1, 2)).transpose(1, 2) for tensor in (query, key, value)]
        rows, places = _single_positions(ranges)
        for whole in gradients[:2]:
            whole[rows, :, places] = 0
        gradients[2][rows, :, places] = gradient[rows, :, places].unflatten(1, (value.shape[1], -1)).sum(2)
        for place in (document.place for document in ranges if document.length > 1):
            parts = private_torch.flash_attention_on_cpu_backward(
                gradient[place], query[place], key[place], value[place], output[place], sums[place], 0.0, is_causal,
                scale=scale,
            )  # fmt: skip
            for whole, part in zip(gradients, parts, strict=True):
                whole[place] = part
        return *gradients, None, None, None


def _single_positions(ranges: list[DocumentRange]) -> tuple[list[int], list[int]]:
    """Returns the rows and places of documents of one position, such as the filling at the end of a sequence."""
    singles = [document for document in ranges if document.length == 1]
    return [document.row for document in singles], [document.first for document in singles]


def apply(
    token: int | None,
    model: nn.Module,
    *,
    masks: bool = False,
    piece: int = 0,
    pieces: int = 1,
    whole: bool = True,
    compiled: bool = False,
) -> Documents | None:
    """Keeps attention and positions of `model` within documents that `token` ends. A model that is not run `whole`,
    with the tokens of whole sequences, gets these by `see`. `compiled`: torch.compile takes what is around attention.
    """
    if token is None:
        return None
    if (earlier := documents_of(model)) is not None:  # a stage of a network whose calls are recorded
        return earlier
    documents = Documents(token, masks=masks, piece=piece, pieces=pieces)
    if compiled:  # what it runs, and how often, changes with each input
        documents.attend = torch.compiler.disable(documents.attend)  # type: ignore[method-assign]
    if hasattr(model, "set_attn_implementation"):
        _apply_to_transformers(documents, model, whole=whole)
        return documents

    def look(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        documents.see(inputs[0])

    for module in model.modules():
        module.documents_of_input = documents  # type: ignore[assignment]
        if isinstance(module, Attention | GroupedAttention):
            module.attend = documents.attend
        elif isinstance(module, PositionalEmbedding):
            module.documents = documents
    if whole:
        model.register_forward_pre_hook(look)
    return documents


def documents_of(model: nn.Module) -> Documents | None:
    """Returns the documents within which a model, or a module of one, stays."""
    return getattr(model, "documents_of_input", None)


def see(model: nn.Module, tokens: object) -> None:
    """Gives a model the tokens of whole sequences, before it is run with a part of these, or with a stage's input."""
    documents = documents_of(model)
    if documents is not None and isinstance(tokens, Tensor):
        documents.see(tokens)


# ----------------------------------------------------------------------------------------------------- transformers


def _apply_to_transformers(documents: Documents, model: Any, *, whole: bool) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend_in_transformers)
    model.set_attn_implementation(ATTENTION)
    for module in model.modules():
        module.documents_of_input = documents

    def look(
        module: nn.Module, inputs: tuple[Tensor, ...], keywords: dict[str, object]
    ) -> tuple[tuple[Tensor, ...], dict[str, object]]:
        if whole:
            documents.see(inputs[0])
        places = recorded_places(inputs[0]) if documents.is_recorded else documents.places
        return inputs, {**keywords, "position_ids": places}

    model.register_forward_pre_hook(look, with_kwargs=True)


def recorded_places(tokens: Tensor) -> Tensor:
    """Stands for the positions of tokens within their documents while calls are recorded."""
    if has_torch_function((tokens,)):
        places: Tensor = handle_torch_function(recorded_places, (tokens,), tokens)
        return places
    return torch.zeros_like(tokens)


def cast_operands(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns operands as autocast would pass them to torch's attention."""
    device = query.device.type
    if not torch.is_autocast_enabled(device):
        return query, key, value
    low = torch.get_autocast_dtype(device)
    return query.to(low), key.to(low), value.to(low)


def recorded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Stands for `Documents.attend` while calls are recorded."""
    of_call: dict[str, Any] = {"is_causal": is_causal, "window": window, "scale": scale, "dropout": dropout}
    tensors = (query, key, value)
    if has_torch_function(tensors):
        output: Tensor = handle_torch_function(recorded_attention, tensors, *tensors, **of_call)
        return output
    return F.scaled_dot_product_attention(
        *tensors, dropout_p=dropout, is_causal=is_causal, scale=scale, enable_gqa=key.shape[1] != query.shape[1]
    )


@contextlib.contextmanager
def stand_in_calls(documents: Documents | None) -> Iterator[None]:
    """Has a network of `transformers` call `recorded_places` and `recorded_attention` while the context lasts."""
    if documents is None:
        yield
        return
    documents.is_recorded = True
    try:
        yield
    finally:
        documents.is_recorded = False


def real_calls(documents: Documents) -> dict[Callable[..., Tensor], Callable[..., Tensor]]:
    """Returns what a stage calls in place of each function that has stood in."""

    def places(tokens: Tensor) -> Tensor:
        return documents.places

    def attend(*tensors: Tensor, **of_call: Any) -> Tensor:
        return documents.attend(*tensors, **of_call)

    return {recorded_places: places, recorded_attention: attend}


def _attend_in_transformers(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **further: object,
) -> tuple[Tensor, None]:
    """Returns attention within documents, (batch, length, heads, head_dim), as the library's interface has it."""
    names = [name for name in _UNSUPPORTED if further.get(name) is not None]
    if names or attention_mask is not None:
        raise ModelError(f"attention with `{(names or ['attention_mask'])[0]}` cannot be kept within documents")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    documents: Documents = module.documents_of_input
    attend = recorded_attention if documents.is_recorded else documents.attend
    output = attend(query, key, value, is_causal=causal, window=sliding_window, scale=scaling, dropout=dropout)
    return output.transpose(1, 2).contiguous(), None


def document_attention(model: Any, length: int) -> tuple[str, bool]:
    """Returns the reason why a network of `transformers` cannot keep documents apart, "" if it can; and whether its
    attention then needs a mask for sequences of this length.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    reasons = {
        "its attention is not exchangeable in the library": not getattr(model, "_supports_attention_backend", False),
        "its layers carry a state from one position to the next": getattr(model, "_is_stateful", False),
        "it takes no `position_ids`": "position_ids" not in inspect.signature(model.forward).parameters,
        "it has an encoder": config.is_encoder_decoder,
        f"it has layers of `{min(kinds, default='')}`": bool(kinds),
        "its attention is in chunks": getattr(config, "attention_chunk_size", None) is not None,
        "it caps the scores of attention": getattr(config, "attn_logit_softcapping", None) is not None,
        "its attention has sinks": any(name.endswith("sinks") for name, _ in model.named_parameters()),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), "")
    window = getattr(config, "sliding_window", None) or length
    is_windowed = window < length and getattr(config, "use_sliding_window", True)
    dropout = getattr(config, "attention_dropout", None) or getattr(config, "attn_pdrop", None) or 0
    widths = {getattr(config, name, None) for name in ("v_head_dim", "qk_head_dim")}
    return reason, bool(is_windowed or dropout or len(widths) > 1)
