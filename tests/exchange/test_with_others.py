"""Every exchange together with what else a training may have, beside all ranks simulated in numpy. A plain training is
compared in the file of each exchange. The last batch of an epoch is of uneven shares on 3 and 4 ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.exchanged_gradients import LowRank, in_codes, rounded
from helpers.exchanged_momenta import Adam
from helpers.exchanged_weights import Outer, Ring, alone, averaged
from helpers.exchanges import (
    ASIDE,
    BOTH,
    JOB,
    TIED,
    Simulated,
    Weights,
    agree,
    buckets_of,
    descend,
    flat,
    job,
    made_data,
    mean_of,
    run,
    three_layers,
    unflatten,
    weights_of,
)
from helpers.launcher import Launcher
from helpers.trained import Trained
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, relu

from dslc.runtime.data.splits import parted

STEPS, CLIP = 6, 0.3

# Returns the weights of the ranks after a step, given its number, those before it, and the ranks' gradients.
Rule = Callable[[int, list[Weights], list[Weights]], list[Weights]]
Agreed = Callable[[list[Weights]], Weights]


def by(agreed: Agreed) -> Rule:
    return lambda step, before, gradients: [descend(before[0], agreed(gradients))] * len(before)


def stepping_alone(exchange: Callable[[int, list[Weights]], list[Weights]]) -> Rule:
    """`exchange` makes of the weights after a step, and its number, those after it."""

    def rule(step: int, before: list[Weights], gradients: list[Weights]) -> list[Weights]:
        return exchange(step, [descend(w, g) for w, g in zip(before, gradients, strict=True)])

    return rule


def local_sgd(simulated: Simulated) -> Rule:
    return stepping_alone(lambda step, taken: [mean_of(taken)] * simulated.ranks if step % 3 == 0 else taken)


def diloco(simulated: Simulated) -> Rule:
    outer = Outer(simulated.exchanged())
    return stepping_alone(lambda step, taken: [outer.step(taken)] * simulated.ranks if step % 2 == 0 else taken)


def decentralized(pairs: bool) -> Callable[[Simulated], Rule]:
    def rule(step: int, before: list[Weights], gradients: list[Weights]) -> list[Weights]:
        return [descend(w, g) for w, g in zip(averaged(before, step - 1, pairs), gradients, strict=True)]

    return lambda simulated: rule


def low_precision(simulated: Simulated) -> Rule:
    start = simulated.exchanged()
    rings = {names: Ring(flat(start, names), simulated.ranks) for names in buckets_of(start, sorted(start))}

    def exchange(step: int, taken: list[Weights]) -> list[Weights]:
        found: list[Weights] = [{} for _ in taken]
        for names, ring in rings.items():
            advanced = ring.exchange([flat(each, names) for each in taken])
            found = [one | unflatten(each, start, names) for one, each in zip(found, advanced, strict=True)]
        return found

    return stepping_alone(exchange)


def never_averaged(simulated: Simulated) -> Rule:
    def rule(step: int, before: list[Weights], gradients: list[Weights]) -> list[Weights]:
        found = [mean_of(gradients)] * simulated.ranks if step <= 3 else alone(gradients, simulated.count)
        return [descend(w, g) for w, g in zip(before, found, strict=True)]

    return rule


def momenta(kind: str) -> Callable[[Simulated], Rule]:
    def made(simulated: Simulated) -> Rule:
        adam = Adam(simulated.exchanged(), simulated.ranks, kind, rate=np.float32(1e-3), eps=np.float32(1e-4))
        return lambda step, before, gradients: [adam.step(gradients)] * simulated.ranks

    return made


@dataclass(frozen=True)
class Exchange:
    """`agreed` is what the ranks make of their gradients, if that is all; else `rule`. A number may be off by `atol`,
    and by `code` where sums are rounded otherwise, since a code may then be the next one.
    """

    rule: Callable[[Simulated], Rule] | None = None
    agreed: Callable[[int], Agreed] | None = None
    atol: float = 1e-6
    code: float = 0.0


EXCHANGES = {
    "fp16()": Exchange(agreed=lambda ranks: lambda each: rounded(each, "fp16"), code=3e-4),
    "bf16()": Exchange(agreed=lambda ranks: lambda each: rounded(each, "bf16"), code=3e-3),
    "powersgd(rank = 1)": Exchange(agreed=lambda ranks: LowRank(ranks, 1).agreed, atol=2e-6),
    "bytegrad()": Exchange(agreed=lambda ranks: in_codes, code=3e-4),
    "local_sgd(period = 3)": Exchange(local_sgd),
    "diloco(period = 2)": Exchange(diloco),
    "decentralized()": Exchange(decentralized(pairs=False)),
    "decentralized(peers = shift_one)": Exchange(decentralized(pairs=True)),
    "low_precision_decentralized()": Exchange(low_precision, atol=1e-3),
    "async_average(interval = 10h, warmup = 3 steps)": Exchange(never_averaged),
    "qadam(lr = 1e-3, eps = 1e-4, warmup = 2)": Exchange(momenta("qadam"), atol=5e-6, code=1e-4),
    "onebit_adam(lr = 1e-3, eps = 1e-4, freeze = 2)": Exchange(momenta("onebit_adam"), atol=5e-6),
}
OPTIMIZERS = JOB.replace("gradients = EXCHANGE", "").replace("sgd(lr = 0.1)", "EXCHANGE")

FROZEN, ACCUMULATED = 'model.freeze=["first.bias"]', "parallelism.microbatches=2"
CASES = {
    "tied": (TIED,),
    "unused": (ASIDE,),
    "frozen": (BOTH, FROZEN),
    "accumulation": (TIED, ACCUMULATED),
    "together": (BOTH, FROZEN, ACCUMULATED),
}


def cases() -> Iterator[object]:
    """Yields every exchange with every case and number of ranks, most of them behind `long`."""
    for exchange in EXCHANGES:
        all_ranks = (2, 4) if "shift_one" in exchange else (2, 3, 4)
        for case, ranks in product(CASES, all_ranks):
            quick = (case, ranks) in (("tied", 2), ("together", all_ranks[1]))
            marks = () if quick else pytest.mark.long
            yield pytest.param(exchange, case, ranks, marks=marks, id=f"{exchange}-{case}-{ranks}")


def mostly_long(exchanges: Iterable[str], *quick: str) -> list[object]:
    """Puts all exchanges but the `quick` ones behind `long`."""
    return [pytest.param(each, marks=() if each in quick else pytest.mark.long) for each in exchanges]


@pytest.mark.cases(3)
@pytest.mark.parametrize(("exchange", "case", "ranks"), list(cases()))
def test_weights_are_those_of_the_rule(
    launcher: Launcher, tmp_path: Path, exchange: str, case: str, ranks: int
) -> None:
    settings = CASES[case]
    clips = EXCHANGES[exchange].agreed is not None and case == "together"
    trained = run(launcher, made(tmp_path, exchange, ranks), *settings, *(f"train.clip={CLIP}",) * clips)
    start = weights_of(trained, 0, 0)
    left_out = {"first.bias"} if FROZEN in settings else set()
    if EXCHANGES[exchange].agreed is None:  # DistributedDataParallel's buckets have also what no step uses
        left_out |= {"aside.weight", "aside.bias"}
    simulated = Simulated(start, ranks, forward=three_layers, names=start.keys() - left_out)
    exact = ranks == 2 and ACCUMULATED not in settings
    follow(trained, simulated, exchange, clips=clips, atol=EXCHANGES[exchange].atol if exact else None)


def made(folder: Path, exchange: str, ranks: int) -> Path:
    return job(folder / "job", ranks, exchange, OPTIMIZERS if "adam" in exchange else JOB)


def follow(
    trained: Trained,
    simulated: Simulated,
    exchange: str,
    *,
    steps: int = STEPS,
    clips: bool = False,
    atol: float | None = None,
    few: float = 0.0,
) -> None:
    """Asserts that the weights of each rank after each step are the simulated ones."""
    found, ranks = EXCHANGES[exchange], simulated.ranks
    if found.agreed is not None:
        agreed = found.agreed(ranks)
        rule = by(lambda gradients: clipped(agreed(gradients)) if clips else agreed(gradients))
    else:
        assert found.rule is not None
        rule = found.rule(simulated)
    for step in range(1, steps + 1):
        gradients, before = simulated.gradients(), [simulated.exchanged(rank) for rank in range(ranks)]
        if all(np.isfinite(each).all() for gradient in gradients for each in gradient.values()):
            simulated.take(rule(step, before, gradients))
        else:  # no rank takes its step, and what is exchanged is weights or nothing
            simulated.scale /= 2
            if found.agreed is None and "adam" not in exchange:
                simulated.take(rule(step, before, [{n: 0 * w for n, w in each.items()} for each in before]))
        agree(trained, simulated, step, max(found.atol, found.code) if atol is None else atol, few)


def clipped(gradient: Weights) -> Weights:
    """Returns the gradient, no longer than `CLIP`."""
    norm = np.sqrt(sum(float(np.square(each).sum()) for each in gradient.values()))
    return {name: each * np.float32(min(1.0, CLIP / (norm + 1e-6))) for name, each in gradient.items()}


def normed(weights: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """Returns the output of a network with a batch norm, whose statistics are updated."""
    hidden = linear(inputs, weights["0.weight"], weights["0.bias"])
    mean, variance = hidden.mean(0), hidden.var(0, correction=0)
    count = len(inputs)
    weights["1.running_mean"].lerp_(mean.detach(), 0.1)
    weights["1.running_var"].lerp_(variance.detach() * (count / (count - 1)), 0.1)
    return after_norm(weights, hidden, mean, variance)


def after_norm(weights: Mapping[str, Tensor], hidden: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    hidden = (hidden - mean) / (variance + 1e-5).sqrt() * weights["1.weight"] + weights["1.bias"]
    return linear(relu(hidden), weights["3.weight"], weights["3.bias"])


OF_WEIGHTS = [word for word, each in EXCHANGES.items() if each.rule is not None and "adam" not in word]


@pytest.mark.parametrize("exchange", mostly_long(OF_WEIGHTS, *OF_WEIGHTS[:1], *OF_WEIGHTS[-2:]))
def test_each_rank_has_statistics_of_its_own(launcher: Launcher, tmp_path: Path, exchange: str) -> None:
    """And the network is evaluated, and saved, with the mean of them."""
    network = "model.network=[linear(7), batch_norm(), relu(), linear(4)]"
    trained = run(launcher, made(tmp_path, exchange, 4), network, "data.validation=10/82", "evaluate.every=6 steps")
    start = weights_of(trained, 0, 0)
    simulated = Simulated(start, 4, forward=normed, names=[n for n in start if "running" not in n])
    whole, (kept, held) = simulated.inputs, parted(0, 72, 82)
    simulated.inputs, targets = whole[kept], simulated.targets
    simulated.targets = targets[kept]
    follow(trained, simulated, exchange)
    mean = mean_of(simulated.weights)
    for name, each in mean.items():
        np.testing.assert_allclose(trained.weights[name], each, rtol=0, atol=EXCHANGES[exchange].atol, err_msg=name)
    weights = {name: torch.from_numpy(each) for name, each in mean.items()}
    hidden = linear(torch.from_numpy(whole[held]), weights["0.weight"], weights["0.bias"])
    output = after_norm(weights, hidden, weights["1.running_mean"], weights["1.running_var"])
    loss = cross_entropy(output, torch.from_numpy(targets[held]))
    assert trained.losses("validation") == pytest.approx([loss.item()], abs=max(1e-5, EXCHANGES[exchange].atol))


@pytest.mark.cases(5)
@pytest.mark.parametrize("exchange", [each for each in EXCHANGES if "async" not in each])
def test_a_step_that_overflows_on_one_rank_is_left_out(launcher: Launcher, tmp_path: Path, exchange: str) -> None:
    """In half precision: no rank takes it, and the scale of the loss is halved."""
    path = made(tmp_path, exchange, 2)
    inputs, targets = made_data()
    inputs[2 * 24 + 12] = 1e4  # the third step's, of rank 1
    np.savez(path.parent / "made.npz", x=inputs, y=targets)
    trained = run(launcher, path, "train.precision=fp16")
    simulated = Simulated(weights_of(trained, 0, 0), 2)
    simulated.inputs, simulated.scale = inputs, 2.0**16 / 2
    simulated.around = lambda: torch.autocast("cpu", torch.float16)
    follow(trained, simulated, exchange, atol=EXCHANGES[exchange].atol)
    assert simulated.scale == 2.0**14


MIDDLE = 2600  # so that the weight of the middle layer fills a bucket


def wide(weights: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    hidden = relu(linear(inputs, weights["0.weight"], weights["0.bias"]))
    hidden = relu(linear(hidden, weights["2.weight"], weights["2.bias"]))
    return linear(hidden, weights["4.weight"], weights["4.bias"])


@pytest.mark.parametrize("exchange", mostly_long(EXCHANGES, "bytegrad()"))
def test_numbers_of_several_buckets(launcher: Launcher, tmp_path: Path, exchange: str) -> None:
    """Of millions of numbers a few are next to the middle of two codes, and sent as the other one."""
    network = f"model.network=[linear({MIDDLE}), relu(), linear({MIDDLE}), relu(), linear(4)]"
    steps = 4 if "adam" in exchange else 2
    trained = run(launcher, made(tmp_path, exchange, 2), network, f"train.steps={steps}")
    start = weights_of(trained, 0, 0)
    assert len(buckets_of(start, sorted(start))) == 2
    atol = 1e-4 if "adam" in exchange else 1e-6
    follow(trained, Simulated(start, 2, forward=wide), exchange, steps=steps, atol=atol, few=0.02)
