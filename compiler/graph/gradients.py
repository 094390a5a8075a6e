"""The step of how parameters, gradients and the optimizer's state lie over the data axis, and of how ranks agree."""

from __future__ import annotations

from dslc.compiler.ir import program as p
from dslc.compiler.placement.exchange import ExchangePolicy
from dslc.compiler.placement.sharding import searches, units
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.language.layers import PythonNetwork, TransformersNetwork


def gradient_step(analysis: Analysis, line: str) -> p.GradientStep:
    """Returns the step; `line` is where the job says how ranks agree."""
    job, layout, model = analysis.job, analysis.layout, analysis.model
    plan = analysis.sharding
    own = isinstance(job.model.network, PythonNetwork | TransformersNetwork)
    stepping = job.train.step is not None  # it exchanges gradients by itself
    return p.GradientStep(
        kind="none" if stepping and plan.engine == "ddp" else plan.engine,
        # A static graph lets DDP skip the search for unused parameters. It excludes `no_sync`, and control flow in a
        # user's module that depends on data.
        static_graph=not own and layout.microbatches == 1,
        unused=model.unused if own and model else (),
        search=plan.engine != "none" and model is not None and searches(model, plan),
        replicas=plan.replicas,
        units=tuple(unit.name for unit in units(model) if unit.name) if plan.engine == "fsdp" and model else (),
        reshard=plan.reshard,
        accumulate=plan.accumulate,
        averages=plan.replicas * plan.shards if plan.engine in ("ddp", "zero1", "local") and not stepping else 1,
        exchange=_exchange(plan.exchange, line) if plan.exchange is not None and not stepping else None,
    )


def _exchange(exchange: ExchangePolicy, line: str) -> p.ExchangeStep:
    return p.ExchangeStep(
        kind=exchange.kind,
        agrees=exchange.agrees,
        every=exchange.every,
        alone=exchange.alone,
        pieces=exchange.pieces,
        arguments=exchange.arguments,
        line=line,
    )
