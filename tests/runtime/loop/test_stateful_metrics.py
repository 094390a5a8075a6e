"""Metrics that keep states give over several ranks what they give over all samples on one."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.gang import gang
from helpers.paths import HELPERS
from torch import Tensor

from dslc.compiler.ir.program import LossStep, MetricStep, PythonFunction
from dslc.runtime.loop.stateful_metrics import MetricError, StatefulMetric, exchange, try_out

KEPT = LossStep(kind="cross_entropy", counts="kept", ignore=-100)
BCE = LossStep(kind="bce")
CLASSES = 5


def own(name: str, **arguments: Any) -> MetricStep:
    function = PythonFunction(function=f"own_metrics:{name}", arguments=arguments, folder=str(HELPERS))
    return MetricStep(kind="python", name=name, python=function)


def of_torch(name: str, **arguments: Any) -> MetricStep:
    return MetricStep(kind="torchmetrics", name=name, torchmetrics=name, arguments=arguments)


STEPS = (
    of_torch("F1Score", average="macro"),
    of_torch("JaccardIndex", average="none"),
    of_torch("AUROC", average="macro"),
    of_torch("ConfusionMatrix"),
    own("Spread", scale=2.0),
    own("InOrder"),
    own("Projected"),
)


def sequences() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    target = torch.randint(CLASSES, (11, 4), generator=made)
    target[torch.rand(11, 4, generator=made) < 0.25] = -100
    return torch.randn(11, 4, CLASSES, generator=made), target


def _on_rank(rank: int, edges: tuple[int, ...], steps: tuple[MetricStep, ...], counts: tuple[bool, ...]) -> Any:
    torch.manual_seed(rank)
    output, target = sequences()
    metrics = [StatefulMetric(step, KEPT) for step in steps]
    for first in range(edges[rank], edges[rank + 1], 2):  # in batches of two
        last = min(first + 2, edges[rank + 1])
        for metric in metrics:
            metric.update(output[first:last], target[first:last])
    return exchange(metrics, len(counts), counts[rank])


@pytest.mark.slow
def test_on_three_ranks_as_on_one() -> None:
    """The first rank has no samples; the last has those of another, and leads nowhere."""
    one = _on_rank(0, (0, 11), STEPS, (True,))
    for found in gang(4, _on_rank, (0, 0, 5, 11, 11), STEPS, (True, True, True, False)):
        assert list(found) == list(one)
        for name, value in one.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


def test_results_are_those_of_torchmetrics_and_of_ones_own() -> None:
    import torchmetrics

    output, target = sequences()
    scores, labels = output.flatten(0, 1), target.flatten()
    whole: dict[str, Any] = {"task": "multiclass", "num_classes": CLASSES, "ignore_index": -100}
    found = _on_rank(0, (0, 11), STEPS, (True,))
    assert found["F1Score"] == pytest.approx(float(torchmetrics.F1Score(average="macro", **whole)(scores, labels)))
    assert found["AUROC"] == pytest.approx(float(torchmetrics.AUROC(average="macro", **whole)(scores, labels)))
    assert len(found["JaccardIndex"]) == CLASSES
    matrix = torch.tensor(found["ConfusionMatrix"])
    assert matrix.shape == (CLASSES, CLASSES) and int(matrix.sum()) == int(target.ne(-100).sum())
    assert found["Spread.seen"] == 44 and found["Spread.most"] == float(output.max())
    assert found["Spread.by_class"] == pytest.approx((2 * output.flatten(0, 1).double().mean(0)[:3]).tolist())


def test_one_number_is_yes_or_no_and_several_are_that_each() -> None:
    scores = torch.tensor([[3.0], [-2.0], [1.0], [-1.0]])
    for output, target in ((scores, scores.gt(0).float()), (scores.repeat(1, 3), scores.repeat(1, 3).gt(0).float())):
        metric = StatefulMetric(of_torch("F1Score", average="macro"), BCE)
        metric.update(output, target)
        assert metric.result([metric.states()]) == {"F1Score": 1.0}


def test_a_metric_of_nothing_is_nan() -> None:
    (value,) = StatefulMetric(own("InOrder"), KEPT).result([None, None]).values()
    assert isinstance(value, float) and math.isnan(value)


@pytest.mark.parametrize(
    ("loss", "average", "scores", "target", "defined"),
    [
        (BCE, "macro", [[0.3]], [[1.0]], [False]),
        (KEPT, "macro", [[0.3, 0.1, 0.2]], [1], [False]),
        (KEPT, "none", [[0.3, 0.1, 0.2], [0.1, 0.4, 0.2]], [0, 1], [True, True, False]),
        (BCE, "none", [[0.3, 0.1], [0.2, 0.2]], [[1.0, 0.0], [0.0, 0.0]], [True, False]),
    ],
)
def test_an_area_under_no_curve_is_nan(
    loss: LossStep, average: str, scores: Any, target: Any, defined: list[bool]
) -> None:
    """Where all samples are of a class, or none, as a single one always is."""
    metric = StatefulMetric(of_torch("AUROC", average=average), loss)
    metric.update(torch.tensor(scores), torch.tensor(target))
    values = np.atleast_1d(metric.result([metric.states()])["AUROC"])
    assert np.isfinite(values).tolist() == defined


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("not_additive", r"it gives {'not_additive': 0\.\d+} over all samples, and {'not_additive': 1\.\d+} put toget"),
        ("of_batches", "it gives .* over all samples, and .* put together"),
        ("not_counting", "not_counting has no `states`, which says of each attribute"),
        ("not_a_number", "`compute` gives a str, and should give a number"),
        ("not_a_tensor", "its state `seen` is of type int, and a state is a tensor"),
        ("half_named", "it counts in `right`, which `states` does not name"),
        ("half_named number", "it counts in `right`, which `states` does not name"),
        ("of_torchmetrics", "it counts in `right`, which `states` does not name"),
    ],
)
def test_what_does_not_add_up_is_refused(name: str, said: str) -> None:
    function, _, start = name.partition(" ")
    with pytest.raises(MetricError, match=said):
        try_out(own(function, **{"start": start} if start else {}), KEPT, in_two())


@pytest.mark.parametrize("form, result", [("yes or no", 1), ("list", [1]), ("array", [1.0, 0.5]), ("scalar", 0.5)])
def test_a_result_is_a_number_of_a_record_in_each_form(form: str, result: object) -> None:
    output, target = sequences()
    metric = StatefulMetric(own("Hits", form=form), KEPT)
    metric.update(output, target)
    assert json.dumps(metric.result([metric.states()])) == json.dumps({"Hits": result})


@pytest.mark.parametrize("name, form", [("Hits", "a\nb"), ("step", "yes or no"), ("loss", "scalar")])
def test_a_result_with_the_name_of_another_number_is_refused(name: str, form: str) -> None:
    function = PythonFunction(function="own_metrics:Hits", arguments={"form": form}, folder=str(HELPERS))
    with pytest.raises(MetricError, match="needs another name"):
        try_out(MetricStep(kind="python", name=name, python=function), KEPT, in_two())


def in_two() -> list[tuple[Tensor, Tensor]]:
    output, target = sequences()
    return [(output[:5], target[:5]), (output[5:], target[5:])]


def test_what_adds_up_is_not() -> None:
    for step in STEPS[-3:]:
        try_out(step, KEPT, in_two())
    noise = torch.Generator().manual_seed(0)
    batches = [(torch.randn(count, 3, generator=noise), torch.randn(count, 3, generator=noise)) for count in (3, 4)]
    try_out(own("Spread"), LossStep(kind="mse"), batches)
