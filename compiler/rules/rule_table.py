"""The rules in their order, each with what it needs: `check_rules` asks a rule only where all of that is known.

A rule is a pure function over what is known of a job, which adds diagnostics to a report. None is an unknown, or stands
for a field that could not be read; a rule whose tuple does not name it takes it as None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dslc.compiler.ir.facts import Facts, SourceFacts
from dslc.compiler.model.model import ModelGraph
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.tensor_plan import TensorPlan
from dslc.compiler.placement.workload import Workload
from dslc.compiler.rules import job_rules
from dslc.compiler.rules.data.documents import check_documents
from dslc.compiler.rules.data.images import check_pictures
from dslc.compiler.rules.data.mixtures import check_mixture, each_source
from dslc.compiler.rules.data.padding import check_padding
from dslc.compiler.rules.data.samplers import check_sampler
from dslc.compiler.rules.data.structures import check_structures
from dslc.compiler.rules.model.adapters import check_adapter
from dslc.compiler.rules.model.cross_sample_losses import check_whole_loss
from dslc.compiler.rules.model.forward_passes import check_forward_passes
from dslc.compiler.rules.model.weights import check_weights
from dslc.compiler.rules.parallelism.exchange import check_exchange
from dslc.compiler.rules.parallelism.pipeline import check_pipeline
from dslc.compiler.rules.training.checkpoint import check_checkpoints
from dslc.compiler.rules.training.custom_optimizer import check_own_optimizer
from dslc.compiler.rules.training.custom_step import check_own_step
from dslc.compiler.rules.training.goals import check_goals
from dslc.compiler.rules.training.metrics import check_metrics
from dslc.compiler.rules.training.options import check_patterns, check_training
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.job import JobSpec
from dslc.dsl.record import Record, record

T = TypeVar("T")


@record
class KnownFacts(Record):
    """What is known of a job when the rules are asked. `uncalled`: a network that was made and could not be called."""

    job: JobSpec
    facts: Facts
    source: SourceFacts
    layout: Layout | None
    workload: Workload | None
    model: ModelGraph | None
    cuts: TensorPlan | None
    uncalled: ModelGraph | None = None


Rule = Callable[[KnownFacts, Report], object]
Rules = tuple[tuple[Rule, tuple[str, ...]], ...]


def check_rules(rules: Rules, known: KnownFacts, report: Report) -> list[object]:
    """Asks each rule whose needs are known; returns what the rules return."""
    return [rule(known, report) for rule, needs in rules if all(getattr(known, need) is not None for need in needs)]


def _present(value: T | None) -> T:
    """Returns a value that the needs of a rule name."""
    assert value is not None
    return value


def _check_pictures(known: KnownFacts, report: Report) -> None:
    for job, source in each_source(known.job, known.source):
        check_pictures(job, source, report)


# Each returns whether the ranks can share the batches out at all; without that no rule on axes is asked.
SHARING: Rules = (
    (lambda k, report: check_structures(k.job, k.layout, k.source, k.facts.model, report), ()),
    (lambda k, report: check_own_step(k.job, k.layout, report), ()),
    (lambda k, report: check_whole_loss(k.job, k.layout, k.source, k.facts.model, report), ()),
)
JOB: Rules = (
    (lambda k, report: job_rules.check_sequence_length(k.job, report), ()),
    (lambda k, report: job_rules.check_length(k.job, k.layout, k.workload, report), ()),
    (lambda k, report: check_exchange(k.job, k.layout, k.model, report), ()),
    (lambda k, report: check_metrics(k.job, k.source, k.model, report), ()),
    (lambda k, report: check_goals(k.job, k.workload, report), ()),
    (lambda k, report: check_sampler(k.job, k.workload, k.source, report), ()),
    (lambda k, report: check_mixture(k.job, k.workload, k.source, report), ()),
    (lambda k, report: job_rules.check_ignored(k.job, k.source, report), ()),
    (lambda k, report: job_rules.warn_of_samples(k.job, k.source, report), ()),
    (lambda k, report: check_documents(k.job, k.layout, k.source, k.model, report), ()),
    (lambda k, report: check_checkpoints(k.job, report), ()),
    (lambda k, report: check_training(k.job, k.layout, k.model, report), ()),
    (
        lambda k, report: job_rules.check_batch_norm(
            k.job, _present(k.layout), _present(k.workload), _present(k.model), report
        ),
        ("layout", "workload", "model"),
    ),
    (lambda k, report: job_rules.check_axes(k.job, _present(k.layout), k.source, k.model, k.cuts, report), ("layout",)),
    (lambda k, report: check_pipeline(k.job, _present(k.layout), k.model, report), ("layout",)),
    (lambda k, report: job_rules.warn_of_invariants(k.job, _present(k.layout), k.model, report), ("layout",)),
    (
        lambda k, report: check_forward_passes(k.job, _present(k.layout), k.workload, _present(k.model), report),
        ("layout", "model"),
    ),
)
USER_CODE: Rules = (
    (lambda k, report: check_own_optimizer(k.job, k.layout, k.facts.optimizer, report), ()),
    (_check_pictures, ()),
    (lambda k, report: check_padding(k.job, k.source, k.facts.model, report), ()),
)
NETWORK: Rules = (
    (lambda k, report: check_patterns(k.job, _present(k.uncalled), report), ("uncalled",)),
    (lambda k, report: check_weights(k.job, k.model or k.uncalled, k.facts.weights, report), ()),
    (lambda k, report: check_adapter(k.job, k.model, report), ()),
)
