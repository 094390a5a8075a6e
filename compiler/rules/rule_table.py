"""The rules in their order, each with what it needs: `check_rules` asks a rule only where all of that is known.

A rule is a pure function from what is known of a job to diagnostics. None is an unknown, or stands
for a field that could not be read; a rule whose tuple does not name it takes it as None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from dslc.compiler.facts.sources import each_source
from dslc.compiler.ir.facts import Facts, SourceFacts
from dslc.compiler.model.model import ModelGraph
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.tensor_plan import TensorPlan
from dslc.compiler.placement.workload import Workload
from dslc.compiler.rules import job_rules
from dslc.compiler.rules.data.conversations import check_conversations
from dslc.compiler.rules.data.documents import check_documents
from dslc.compiler.rules.data.images import check_pictures
from dslc.compiler.rules.data.mixtures import check_mixture
from dslc.compiler.rules.data.padding import check_padding
from dslc.compiler.rules.data.samplers import check_sampler
from dslc.compiler.rules.data.structures import check_structure_axes, check_structures
from dslc.compiler.rules.model.adapters import check_adapter
from dslc.compiler.rules.model.chunked_loss import check_chunks
from dslc.compiler.rules.model.cross_sample_losses import check_loss_axes, check_whole_loss
from dslc.compiler.rules.model.experts import (
    check_balance,
    check_balance_loss,
    check_blocks_of_experts,
    check_capacity,
    check_routers,
)
from dslc.compiler.rules.model.float8 import check_float8
from dslc.compiler.rules.model.forward_passes import check_forward_passes
from dslc.compiler.rules.model.loss_draws import check_loss_draws
from dslc.compiler.rules.model.preferences import check_preferences
from dslc.compiler.rules.model.quantization import check_quantization
from dslc.compiler.rules.model.weights import check_weights
from dslc.compiler.rules.parallelism.exchange import check_exchange
from dslc.compiler.rules.parallelism.pipeline import check_pipeline, warn_of_unknown_stages
from dslc.compiler.rules.parallelism.uneven_shares import check_shares
from dslc.compiler.rules.training.checkpoint import check_checkpoints
from dslc.compiler.rules.training.custom_optimizer import check_own_optimizer
from dslc.compiler.rules.training.custom_step import check_own_step, check_step_draws, check_step_fields
from dslc.compiler.rules.training.generation import check_generation
from dslc.compiler.rules.training.goals import check_goals
from dslc.compiler.rules.training.loggers import check_loggers
from dslc.compiler.rules.training.loss_spikes import check_spikes
from dslc.compiler.rules.training.metrics import check_metrics
from dslc.compiler.rules.training.optimizer_sharding import check_codes, check_coupling
from dslc.compiler.rules.training.options import check_patterns, check_training
from dslc.dsl.diagnostics import Diagnostic
from dslc.dsl.language.job import JobSpec
from dslc.dsl.record import Record, record

T = TypeVar("T")


@record
class KnownFacts(Record):
    """The facts of a job at the time when the rules run. `loss_fits`: no error says that the loss does not fit the
    data. `uncalled`: a network that was made and could not be called.
    """

    job: JobSpec
    facts: Facts
    source: SourceFacts
    layout: Layout | None
    workload: Workload | None
    model: ModelGraph | None
    cuts: TensorPlan | None
    loss_fits: bool = True
    uncalled: ModelGraph | None = None


Rule = Callable[[KnownFacts], Iterator[Diagnostic]]
Rules = tuple[tuple[Rule, tuple[str, ...]], ...]


def check_rules(rules: Rules, known: KnownFacts) -> Iterator[Diagnostic]:
    """Yields what the rules find whose needs are known."""
    for rule, needs in rules:
        if all(getattr(known, need) is not None for need in needs):
            yield from rule(known)


def _present(value: T | None) -> T:
    """Returns a value that the needs of a rule name."""
    assert value is not None
    return value


def _check_pictures(known: KnownFacts) -> Iterator[Diagnostic]:
    for job, source in each_source(known.job, known.source):
        yield from check_pictures(job, source)


# If one of these finds an error, the ranks cannot share the batches out, and the rules on axes get no layout.
SHARING: Rules = (
    (lambda k: check_structure_axes(k.job, _present(k.layout), k.source, k.facts.model), ("layout",)),
    (lambda k: check_step_fields(k.job, k.layout), ()),
    (lambda k: check_loss_axes(k.job, _present(k.layout)), ("layout",)),
)
JOB: Rules = (
    (lambda k: check_structures(k.job, k.source, k.facts.model), ()),
    (lambda k: check_own_step(k.job), ()),
    (lambda k: check_whole_loss(k.job, k.source, k.facts.model), ()),
    (lambda k: check_preferences(k.job), ()),
    (lambda k: check_chunks(k.job, k.source, k.layout, k.workload, k.model), ()),
    (lambda k: job_rules.check_sequence_length(k.job), ()),
    (lambda k: job_rules.check_length(k.job, k.layout, k.workload), ()),
    (lambda k: check_exchange(k.job, k.layout, k.model), ()),
    (lambda k: check_metrics(k.job, k.source, k.model, loss_fits=k.loss_fits), ()),
    (lambda k: check_goals(k.job, k.workload), ()),
    (lambda k: check_generation(k.job, k.source, k.model), ()),
    (lambda k: check_spikes(k.job, k.workload), ()),
    (lambda k: check_loggers(k.job), ()),
    (lambda k: check_sampler(k.job, k.workload, k.source), ()),
    (lambda k: check_mixture(k.job, k.workload, k.source), ()),
    (lambda k: job_rules.check_ignored(k.job, k.source), ()),
    (lambda k: job_rules.warn_of_samples(k.job, k.source), ()),
    (lambda k: check_conversations(k.job, k.source), ()),
    (lambda k: check_documents(k.job, k.source, k.model), ()),
    (lambda k: check_balance(k.job), ()),
    (lambda k: check_balance_loss(k.job, k.layout, k.workload), ()),
    (lambda k: check_capacity(k.job, k.layout), ()),
    (lambda k: check_blocks_of_experts(k.job), ()),
    (lambda k: check_routers(k.job), ()),
    (lambda k: check_checkpoints(k.job), ()),
    (lambda k: check_training(k.job, k.layout, k.model), ()),
    (
        lambda k: job_rules.check_batch_norm(k.job, _present(k.layout), _present(k.workload), _present(k.model)),
        ("layout", "workload", "model"),
    ),
    (lambda k: job_rules.check_axes(k.job, _present(k.layout), k.source, k.model, k.cuts), ("layout",)),
    (lambda k: check_pipeline(k.job, _present(k.layout)), ("layout",)),
    (lambda k: check_quantization(k.job, k.layout), ()),
    (lambda k: check_float8(k.job, k.layout, k.model, k.cuts), ()),
    (lambda k: check_coupling(k.job, _present(k.layout)), ("layout",)),
    (lambda k: check_codes(k.job, _present(k.layout), k.model), ("layout",)),
    (lambda k: check_shares(k.job, _present(k.layout), k.workload), ("layout",)),
    (lambda k: job_rules.warn_of_invariants(k.job, _present(k.layout), k.model), ("layout",)),
    (
        lambda k: check_forward_passes(k.job, _present(k.layout), k.workload, _present(k.model)),
        ("layout", "model"),
    ),
)
# Asked of a job without errors.
UNKNOWNS: Rules = ((lambda k: warn_of_unknown_stages(k.job, _present(k.layout), k.model), ("layout",)),)
USER_CODE: Rules = (
    (lambda k: check_own_optimizer(k.job, k.layout, k.facts.optimizer), ()),
    (lambda k: check_step_draws(k.job, k.layout, k.facts.step_draws), ()),
    (lambda k: check_loss_draws(k.job, k.layout, k.facts.loss_draws), ()),
    (_check_pictures, ()),
    (lambda k: check_padding(k.job, k.source, k.facts.model), ()),
)
NETWORK: Rules = (
    (lambda k: check_patterns(k.job, _present(k.uncalled)), ("uncalled",)),
    (lambda k: check_weights(k.job, k.model or k.uncalled, k.facts.weights), ()),
    (lambda k: check_adapter(k.job, k.model, k.layout), ()),
)
