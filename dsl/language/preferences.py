"""Training on preferences: the source of pairs of answers, and the losses that compare the two."""

from __future__ import annotations

from dslc.dsl.language.registry import Call, Float, Int, Path, arg, call, calls, either, word
from dslc.dsl.record import record

REFERENCES = ("initial", "adapter_off")  # words that name a reference; others are files or folders
_BETA = Float(above=0)
_REFERENCE_DOC = (
    "the model whose log-probabilities are subtracted, computed once before the first step: the weights at the start, "
    "the network without its adapter, or a file or folder of weights"
)
_CHUNKS_DOC = "parts in which the last layer and the loss run"


@call("source")
class Preferences(Call):
    """Pairs of answers to one prompt, the preferred one first, as tokens. A sample is a pair, two rows of a
    batch; the loss counts the tokens of the answers alone.
    """

    pairs: str | Call = arg(
        either(Path("read", glob=True), calls("source")),
        "files of JSON Lines with `prompt`, `chosen` and `rejected` on each line, messages or text, or `datasets(…)`",
    )
    tokenizer: str = arg(Path("read"), "the folder of the tokenizer, as `save_pretrained` writes it")
    template: str = arg(
        either(word("default"), Path("read")), "the tokenizer's chat template, or a file with one", default="default"
    )
    max_length: int | None = arg(Int(min=2), "the tokens of a row", default=None, shown="the model's")

    @property
    def context(self) -> int | None:
        """The length of a row."""
        return self.max_length

    @property
    def conversations(self) -> str | Call:
        """The pairs, named as the conversations of `chat` are."""
        return self.pairs


@record
class PreferenceLoss(Call):
    """A loss of pairs: one number for each, averaged over the pairs of the global batch."""

    beta: float = arg(_BETA, "how strongly the reference holds the network", default=0.1)
    chunks: int | str = arg(either(Int(min=1), word("auto")), _CHUNKS_DOC, default=1)


@record
class ReferencedLoss(PreferenceLoss):
    """A loss that subtracts the log-probabilities of a reference model."""

    reference: str = arg(either(word(*REFERENCES), Path("read")), _REFERENCE_DOC, default="initial")


@call("loss", "dpo")
class DPO(ReferencedLoss):
    """Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290): -log sigmoid of `beta` times how much
    more the network prefers the chosen answer than the reference does.
    """


@call("loss", "ipo")
class IPO(ReferencedLoss):
    """Identity preference optimization (Azar et al. 2023, arXiv:2310.12036): the squared distance of the preference, in
    log-probabilities per token, from 1 / (2 beta).
    """


@call("loss", "orpo")
class ORPO(PreferenceLoss):
    """Odds ratio preference optimization (Hong et al. 2024, arXiv:2403.07691), without a reference: the mean cross
    entropy of the chosen answer, plus `beta` times -log sigmoid of the logarithm of the odds ratio.
    """

    beta: float = arg(_BETA, "the weight of the odds ratio, lambda in the paper", default=0.1)


@call("loss", "simpo")
class SimPO(PreferenceLoss):
    """Simple preference optimization (Meng et al. 2024, arXiv:2405.14734), without a reference: -log sigmoid of `beta`
    times the preference in log-probabilities per token, minus `gamma`.
    """

    beta: float = arg(_BETA, "scales the log-probabilities", default=2.0)
    gamma: float = arg(Float(min=0), "the margin by which the chosen answer is to lead", default=0.5)
