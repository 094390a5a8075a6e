"""An exchange that is declared and has a rule: it is planned, counted and proved, though no proof knows its name."""

from typing import ClassVar

import pytest
from helpers.planning import JOBS, compiled

from dslc.compiler.operations.exchange_rules import RULES, Exchanged, ExchangeRule
from dslc.dsl.language.exchanges import Agrees, Exchange
from dslc.dsl.language.registry import CALLS, call


@pytest.mark.parametrize(("agrees_on", "dtype", "size"), [("gradients", "bfloat16", 2), ("weights", "float32", 4)])
def test_an_exchange_is_its_declaration_and_its_rule(
    agrees_on: Agrees, dtype: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = ExchangeRule(collectives=lambda numbers, _: (Exchanged("all_reduce", dtype, size * numbers),))
    monkeypatch.setitem(RULES, "mean_of_all", rule)
    monkeypatch.setitem(CALLS["gradients"], "mean_of_all", Exchange)  # so that it is removed after the test

    @call("gradients")
    class MeanOfAll(Exchange):
        """Ranks take a mean."""

        agrees: ClassVar = agrees_on
        gives_up: ClassVar = "it is a test"

    axes = ("parallelism.pipeline=1", "parallelism.microbatches=1", "parallelism.data=4")
    plan = compiled(JOBS / "pipeline.plt", *axes, "parallelism.gradients=mean_of_all()").plan
    assert plan.parameters is not None
    (traffic,) = plan.ranks[0].traffic
    assert (traffic.what, traffic.dtype, traffic.bytes) == (agrees_on, dtype, size * plan.parameters)
