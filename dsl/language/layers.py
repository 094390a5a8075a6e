"""The layers of networks, and the library networks.

A declaration here is a layer's signature in the user's words. Its shapes, parameters and cost are one function in
`compiler/model/layers.py`; the user never writes sizes that follow from the data or from the layer before. Images are
channels first: `(channels, height, width)`; sequences are `(length, width)`. The batch is not written.
"""

from __future__ import annotations

from dslc.dsl.language.calls import Arguments, PythonCall
from dslc.dsl.language.registry import AnyValue, Bool, Call, Float, Int, ListOf, Str, arg, call, calls, word

_SIZE = Int(min=1)
_BIAS_DOC = "learn and add a bias"
LAYERS = ListOf(calls("layer"))
TASKS = (
    "causal_lm",
    "masked_lm",
    "seq2seq_lm",
    "sequence_classification",
    "token_classification",
    "question_answering",
    "image_classification",
)
ACTIVATIONS = ("relu", "gelu", "silu", "tanh", "sigmoid", "leaky_relu", "elu")
GATES = (*ACTIVATIONS, "gelu_tanh")
Layers = tuple[Call, ...]


# ------------------------------------------------------------------------------------------- dense and convolution


@call("layer")
class Linear(Call):
    """A dense layer over the last dim."""

    features: int = arg(_SIZE, "the number of outputs")
    bias: bool = arg(Bool(), _BIAS_DOC, default=True)
    tie: bool = arg(Bool(), "use the weight of the network's `embedding`; for the last layer", default=False)


@call("layer", "conv1d")
class Conv1d(Call):
    """A convolution over `(channels, length)`."""

    channels: int = arg(_SIZE, "the number of output channels")
    kernel: int = arg(_SIZE, "the length of the kernel", default=3)
    stride: int = arg(_SIZE, "the step of the kernel", default=1)
    padding: int = arg(Int(min=0), "zeros added at each end", default=0)
    groups: int = arg(_SIZE, "groups of channels that do not mix", default=1)
    bias: bool = arg(Bool(), _BIAS_DOC, default=True)


@call("layer", "conv2d")
class Conv2d(Call):
    """A convolution over `(channels, height, width)`."""

    channels: int = arg(_SIZE, "the number of output channels")
    kernel: int = arg(_SIZE, "the side of the square kernel", default=3)
    stride: int = arg(_SIZE, "the step of the kernel", default=1)
    padding: int = arg(Int(min=0), "zeros added at each side", default=0)
    groups: int = arg(_SIZE, "groups of channels that do not mix", default=1)
    bias: bool = arg(Bool(), _BIAS_DOC, default=True)


@call("layer", "max_pool1d")
class MaxPool1d(Call):
    """The maximum over windows of `(channels, length)`."""

    kernel: int = arg(_SIZE, "the length of the window")
    stride: int | None = arg(_SIZE, "the step of the window", default=None, shown="the kernel")
    padding: int = arg(Int(min=0), "added at each end, never the maximum", default=0)


@call("layer", "max_pool2d")
class MaxPool2d(Call):
    """The maximum over windows of `(channels, height, width)`."""

    kernel: int = arg(_SIZE, "the side of the square window")
    stride: int | None = arg(_SIZE, "the step of the window", default=None, shown="the kernel")
    padding: int = arg(Int(min=0), "added at each side, never the maximum", default=0)


@call("layer", "avg_pool1d")
class AvgPool1d(Call):
    """The mean over windows of `(channels, length)`."""

    kernel: int = arg(_SIZE, "the length of the window")
    stride: int | None = arg(_SIZE, "the step of the window", default=None, shown="the kernel")
    padding: int = arg(Int(min=0), "zeros added at each end", default=0)


@call("layer", "avg_pool2d")
class AvgPool2d(Call):
    """The mean over windows of `(channels, height, width)`."""

    kernel: int = arg(_SIZE, "the side of the square window")
    stride: int | None = arg(_SIZE, "the step of the window", default=None, shown="the kernel")
    padding: int = arg(Int(min=0), "zeros added at each side", default=0)


@call("layer", "adaptive_avg_pool1d")
class AdaptiveAvgPool1d(Call):
    """The mean over `size` windows, whatever the length."""

    size: int = arg(_SIZE, "the length of the output", default=1)


@call("layer", "adaptive_avg_pool2d")
class AdaptiveAvgPool2d(Call):
    """The mean over `size` times `size` windows, whatever the height and width."""

    size: int = arg(_SIZE, "the height and width of the output", default=1)


@call("layer", "adaptive_max_pool2d")
class AdaptiveMaxPool2d(Call):
    """The maximum over `size` times `size` windows, whatever the height and width."""

    size: int = arg(_SIZE, "the height and width of the output", default=1)


@call("layer")
class Flatten(Call):
    """All dims of a sample in one."""


# ------------------------------------------------------------------------------------ normalisation and activation


@call("layer")
class BatchNorm(Call):
    """Normalises each channel over the batch: the global batch with `sync`, else each rank's share."""

    sync: bool = arg(Bool(), "statistics over all data-parallel ranks, as one process has them", default=True)
    momentum: float = arg(Float(min=0, max=1), "the weight of a new batch in the running statistics", default=0.1)
    eps: float = arg(Float(above=0), "added to the variance", default=1e-5)


@call("layer")
class LayerNorm(Call):
    """Normalises over the last dim."""

    eps: float = arg(Float(above=0), "added to the variance", default=1e-5)
    bias: bool = arg(Bool(), _BIAS_DOC, default=True)


@call("layer", "rms_norm")
class RMSNorm(Call):
    """Divides by the root mean square over the last dim."""

    eps: float = arg(Float(above=0), "added to the mean square", default=1e-6)


@call("layer", "relu")
class ReLU(Call):
    """max(0, x)."""


@call("layer", "gelu")
class GELU(Call):
    """x times the normal distribution function of x."""

    approximate: str = arg(word("none", "tanh"), "exact, or by the hyperbolic tangent", default="none")


@call("layer", "silu")
class SiLU(Call):
    """x times sigmoid(x)."""


@call("layer")
class Tanh(Call):
    """The hyperbolic tangent."""


@call("layer")
class Sigmoid(Call):
    """1 / (1 + exp(-x))."""


@call("layer", "leaky_relu")
class LeakyReLU(Call):
    """x where positive, else a small multiple of it."""

    slope: float = arg(Float(), "the factor of negative numbers", default=0.01)


@call("layer", "elu")
class ELU(Call):
    """x where positive, else alpha times (exp(x) - 1)."""

    alpha: float = arg(Float(above=0), "the limit on the negative side", default=1.0)


@call("layer")
class Dropout(Call):
    """Sets each number to zero with probability `p` while training."""

    p: float = arg(Float(min=0, below=1), "the probability", default=0.5)


# --------------------------------------------------------------------------------------------------- sequences


@call("layer")
class Embedding(Call):
    """A learned vector for each token."""

    vocab: int | None = arg(_SIZE, "the number of tokens", default=None, shown="the data's")
    width: int = arg(_SIZE, "the length of a vector")


@call("layer")
class PositionalEmbedding(Call):
    """Adds a learned vector for each position."""

    context: int | None = arg(_SIZE, "the longest sequence", default=None, shown="the length of the input")


@call("rope_scaling", "linear")
class LinearScaling(Call):
    """Divides all positions by the factor."""

    factor: float = arg(Float(min=1), "how many times longer than those trained on the sequences may be")


@call("rope_scaling", "llama3")
class Llama3Scaling(Call):
    """Llama 3's: divides the positions of slow rotations, leaves fast ones, and blends between."""

    factor: float = arg(Float(min=1), "what the positions of slow rotations are divided by")
    low_freq_factor: float = arg(Float(above=0), "slower than this many turns in `original_context`", default=1.0)
    high_freq_factor: float = arg(Float(above=0), "faster than this many turns in `original_context`", default=4.0)
    original_context: int = arg(_SIZE, "the longest sequence before scaling", default=8192)


_HEADS_DOC = "the number of heads, which divide the width"
_KV_DOC = "heads of keys and values, which divide `heads`"
_HEAD_DIM_DOC = "the width of a head"
_BY_HEADS = "width / heads"
_THETA = Float(above=1)
_THETA_DOC = "the base of rotary positions"
_SCALINGS = calls("rope_scaling")
_SCALING_DOC = "how rotary positions are stretched"
_WINDOW_DOC = "a position sees this many, itself and those before it"
_QK_DOC = "normalise queries and keys, each head by its root mean square"
_EPS = Float(above=0)


@call("layer")
class Attention(Call):
    """Multi-head self-attention over `(length, width)`, with its projections: one for queries, keys and values
    together (`qkv`, `output`), or, with any of the arguments from `kv_heads` on, one for each (`q_proj`, `k_proj`,
    `v_proj`, `o_proj`).
    """

    heads: int = arg(_SIZE, _HEADS_DOC)
    causal: bool = arg(Bool(), "a position sees only those before it", default=False)
    bias: bool = arg(Bool(), _BIAS_DOC, default=True)
    dropout: float = arg(Float(min=0, below=1), "dropout of the result", default=0.0)
    kv_heads: int | None = arg(_SIZE, _KV_DOC, default=None, shown="heads")
    head_dim: int | None = arg(_SIZE, _HEAD_DIM_DOC, default=None, shown=_BY_HEADS)
    rope_theta: float | None = arg(_THETA, _THETA_DOC, default=None, shown="no rotary positions")
    rope_scaling: Call | None = arg(_SCALINGS, _SCALING_DOC, default=None)
    window: int | None = arg(_SIZE, _WINDOW_DOC, default=None, shown="all")
    qk_norm: bool = arg(Bool(), _QK_DOC, default=False)
    norm_eps: float = arg(_EPS, "added to the mean square by `qk_norm`", default=1e-6)

    @property
    def separate(self) -> bool:
        """True if queries, keys and values have projections of their own."""
        given = (self.kv_heads, self.head_dim, self.rope_theta, self.window)
        return self.qk_norm or any(value is not None for value in given)


@call("layer", "gated_mlp")
class GatedMLP(Call):
    """Two dense layers, one of them through the activation, multiplied, and a third back to the width (Shazeer 2020,
    arXiv:2002.05202).
    """

    hidden: int = arg(_SIZE, "the width between")
    activation: str = arg(word(*GATES), "of the gate", default="silu")
    bias: bool = arg(Bool(), _BIAS_DOC, default=False)


@call("balance", "loss")
class BalanceLoss(Call):
    """Adds `factor * experts * sum(f * P)` to the loss of a training step, for each layer (Fedus et al. 2021,
    arXiv:2101.03961). The sum is over the experts: f is the share of the global batch's tokens that an expert gets, and
    P its mean probability.
    """

    factor: float = arg(Float(min=0), "the factor of the added loss", default=0.01)


@call("balance", "bias")
class BalanceBias(Call):
    """A bias for each expert joins its score for the choice, not for the weight. After each step it grows where an
    expert got fewer tokens of the global batch than the mean, and falls where it got more (Wang et al. 2024,
    arXiv:2408.15664).
    """

    rate: float = arg(Float(min=0), "what a step adds to a bias, or takes from it; 0 leaves the biases", default=0.001)


@call("layer", "moe")
class MixtureOfExperts(Call):
    """Gated networks; each token uses `top_k` of them, picked and weighed by a router; no token is dropped without a
    `capacity` (Shazeer et al. 2017, arXiv:1701.06538).
    """

    experts: int = arg(Int(min=1), "the number of gated networks")
    top_k: int = arg(_SIZE, "the experts of a token")
    hidden: int = arg(_SIZE, "the width inside an expert, a multiple of 8")
    shared: int = arg(Int(min=0), "experts that see every token, as one network of `shared * hidden`", default=0)
    score: str = arg(word("softmax", "sigmoid"), "the router's scores, in float32", default="softmax")
    normalize: bool = arg(Bool(), "divide the weights of a token by their sum", default=True)
    scale: float = arg(Float(above=0), "the factor of the weights", default=1.0)
    balance: Call | None = arg(calls("balance"), "what keeps experts equally busy", default=None, shown="none")
    capacity: float | None = arg(
        Float(above=0),
        "tokens of the global batch that an expert takes in training, over its even share",
        default=None,
        shown="none: all",
    )


@call("experts", "moe")
class BlockExperts(MixtureOfExperts):
    """The same in the blocks of a network, in place of their gated networks."""


_EXPERTS = calls("experts")
_EXPERTS_DOC = "a mixture of experts in place of the gated network"


@call("layer")
class TransformerBlock(Call):
    """Attention and a two-layer network of ratio times the width, each normalised before and added to its input."""

    heads: int = arg(_SIZE, _HEADS_DOC)
    ratio: int = arg(_SIZE, "the inner width of the network, over the width", default=4)
    causal: bool = arg(Bool(), "a position sees only those before it", default=False)
    bias: bool = arg(Bool(), _BIAS_DOC, default=True)
    dropout: float = arg(Float(min=0, below=1), "dropout of both results", default=0.0)


@call("layer")
class LlamaBlock(Call):
    """Causal attention with rotary positions and a gated network, each normalised by its root mean square before and
    added to its input (Touvron et al. 2023, arXiv:2302.13971).
    """

    heads: int = arg(_SIZE, _HEADS_DOC)
    hidden: int | None = arg(_SIZE, "the width inside the gated network", default=None, shown="none, with `experts`")
    kv_heads: int | None = arg(_SIZE, _KV_DOC, default=None, shown="heads")
    head_dim: int | None = arg(_SIZE, _HEAD_DIM_DOC, default=None, shown=_BY_HEADS)
    rope_theta: float = arg(_THETA, _THETA_DOC, default=10_000.0)
    rope_scaling: Call | None = arg(_SCALINGS, _SCALING_DOC, default=None)
    window: int | None = arg(_SIZE, _WINDOW_DOC, default=None, shown="all")
    qk_norm: bool = arg(Bool(), _QK_DOC, default=False)
    activation: str = arg(word(*GATES), "of the gate", default="silu")
    bias: bool = arg(Bool(), "give the attention's projections biases", default=False)
    mlp_bias: bool = arg(Bool(), "give the gated network biases", default=False)
    norm_eps: float = arg(_EPS, "added to the mean squares", default=1e-6)
    experts: Call | None = arg(_EXPERTS, _EXPERTS_DOC, default=None, shown="none")


@call("layer", "lstm")
class LSTM(Call):
    """A long short-term memory over `(length, width)`."""

    width: int = arg(_SIZE, "the width of the state and of the output")
    layers: int = arg(_SIZE, "the number of stacked layers", default=1)
    bidirectional: bool = arg(Bool(), "a second LSTM reads backwards; the output has twice the width", default=False)
    bias: bool = arg(Bool(), _BIAS_DOC, default=True)


@call("layer")
class LastStep(Call):
    """The last position of a sequence: `(length, width)` becomes `(width)`."""


@call("layer")
class MeanSteps(Call):
    """The mean over the positions of a sequence: `(length, width)` becomes `(width)`."""


@call("layer")
class PatchEmbedding(Call):
    """Cuts an image into square patches and maps each to a vector; a learned vector for each position is added."""

    patch: int = arg(_SIZE, "the side of a patch")
    width: int = arg(_SIZE, "the length of a vector")


# -------------------------------------------------------------------------------------------------- composition


@call("layer")
class Residual(Call):
    """Adds the input to the output of the layers; with `shortcut`, the output of those instead of the input."""

    layers: Layers = arg(ListOf(calls("layer"), min_length=1), "the layers beside the shortcut")
    shortcut: Layers = arg(LAYERS, "the layers on the shortcut", default=())


@call("layer")
class Repeat(Call):
    """The same layers several times over, each time with parameters of its own."""

    count: int = arg(_SIZE, "how many times")
    layers: Layers = arg(ListOf(calls("layer"), min_length=1), "what is repeated")


# ---------------------------------------------------------------------------------------------- library networks


@call("network", "mlp")
class MLP(Call):
    """Dense layers with an activation between them, on the flattened input."""

    widths: tuple[int, ...] = arg(ListOf(_SIZE), "the widths of the hidden layers", default=(128,))
    classes: int | None = arg(_SIZE, "the number of outputs", default=None, shown="the data's classes")
    activation: str = arg(word(*ACTIVATIONS), "between the layers", default="relu")
    dropout: float = arg(Float(min=0, below=1), "after each activation", default=0.0)


@call("network", "convnet")
class ConvNet(Call):
    """Convolution, batch norm, relu and pooling for each entry of `channels`, then one dense layer."""

    channels: tuple[int, ...] = arg(ListOf(_SIZE, min_length=1), "the channels of each convolution", default=(16, 32))
    classes: int | None = arg(_SIZE, "the number of outputs", default=None, shown="the data's classes")
    kernel: int = arg(_SIZE, "the side of the kernels; odd, so that the size stays", default=3)


@call("network", "resnet")
class ResNet(Call):
    """A residual network (He et al. 2015, arXiv:1512.03385)."""

    depth: int = arg(Int(choices=(18, 34, 50, 101, 152)), "18, 34, 50, 101 or 152", default=18)
    classes: int | None = arg(_SIZE, "the number of outputs", default=None, shown="the data's classes")
    width: int = arg(_SIZE, "the channels of the first stage", default=64)
    stem: str = arg(
        word("imagenet", "small"), "a 7x7 convolution and pooling, or one 3x3 convolution", default="imagenet"
    )


@call("network", "vit")
class ViT(Call):
    """A vision transformer (Dosovitskiy et al. 2020, arXiv:2010.11929), the mean of the patches classified."""

    patch: int = arg(_SIZE, "the side of a patch")
    layers: int = arg(_SIZE, "the number of transformer blocks")
    width: int = arg(_SIZE, "the width of the blocks")
    heads: int = arg(_SIZE, _HEADS_DOC)
    classes: int | None = arg(_SIZE, "the number of outputs", default=None, shown="the data's classes")
    dropout: float = arg(Float(min=0, below=1), "dropout in the blocks", default=0.0)


@call("network", "gpt")
class GPT(Call):
    """A causal transformer over tokens (Radford et al. 2019), normalised before each part."""

    layers: int = arg(_SIZE, "the number of transformer blocks")
    width: int = arg(_SIZE, "the width of the blocks")
    heads: int = arg(_SIZE, _HEADS_DOC)
    context: int = arg(_SIZE, "the longest sequence")
    vocab: int | None = arg(_SIZE, "the number of tokens", default=None, shown="the data's")
    tie: bool = arg(Bool(), "let the head use the embedding's weight", default=False)
    dropout: float = arg(Float(min=0, below=1), "dropout in the blocks", default=0.0)
    bias: bool = arg(Bool(), "give the blocks biases", default=True)


@call("network")
class Llama(Call):
    """Llama (Touvron et al. 2023, arXiv:2302.13971) and its kin, Llama 3 and Qwen 3 among them, with the names of
    parameters of `transformers`, so that `weights` takes their files.
    """

    layers: int = arg(_SIZE, "the number of blocks")
    width: int = arg(_SIZE, "the width of the blocks")
    heads: int = arg(_SIZE, _HEADS_DOC)
    hidden: int | None = arg(_SIZE, "the width inside the gated networks", default=None, shown="none, with `experts`")
    context: int = arg(_SIZE, "the longest sequence")
    kv_heads: int | None = arg(_SIZE, _KV_DOC, default=None, shown="heads")
    head_dim: int | None = arg(_SIZE, _HEAD_DIM_DOC, default=None, shown=_BY_HEADS)
    vocab: int | None = arg(_SIZE, "the number of tokens", default=None, shown="the data's")
    rope_theta: float = arg(_THETA, _THETA_DOC, default=10_000.0)
    rope_scaling: Call | None = arg(_SCALINGS, _SCALING_DOC, default=None)
    window: int | None = arg(_SIZE, _WINDOW_DOC, default=None, shown="all")
    max_window_layers: int = arg(Int(min=0), "the first blocks, which `window` leaves out", default=0)
    qk_norm: bool = arg(Bool(), _QK_DOC, default=False)
    activation: str = arg(word(*GATES), "of the gates", default="silu")
    bias: bool = arg(Bool(), "give the attention's projections biases", default=False)
    mlp_bias: bool = arg(Bool(), "give the gated networks biases", default=False)
    norm_eps: float = arg(_EPS, "added to the mean squares", default=1e-6)
    tie: bool = arg(Bool(), "let the head use the embedding's weight", default=False)
    init_std: float = arg(Float(min=0), "the deviation of initial weights", default=0.02)
    experts: Call | None = arg(
        _EXPERTS, "a mixture of experts in place of the gated networks", default=None, shown="none"
    )
    dense_layers: int = arg(Int(min=0), "the first blocks, which keep their gated networks", default=0)


@call("network", "python", open=True)
class PythonNetwork(PythonCall):
    """A `torch.nn.Module` that a function of yours returns; it is put into training mode (`.train()`)."""


@call("network", "transformers", open=True)
class TransformersNetwork(Call):
    """A model of the `transformers` library, built from a configuration: its head follows from the data or from `task`,
    and nothing is downloaded.
    """

    path: str = arg(Str(), "a folder with a `config.json`, such a file, or a type: `gpt2`, `llama`, …")
    task: str | None = arg(
        word(*TASKS), "the head, `AutoModelFor…`", default=None, shown="the data's, else the configuration's"
    )
    arguments: Arguments = arg(AnyValue(), "values that override those of the configuration", default=())
