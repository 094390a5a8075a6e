"""Decides whether the random numbers of forward passes follow from the sample, so that no plan changes them.

They do, unless the job keeps torch's generators (`train.dropout_generator = torch`). Compiled code for the tensor axis
of GPUs draws by torch's generators too. Of a network that a function makes tracing says which classes of modules draw,
and whether one draws what the runtime cannot give by sample; so does a trial of a user's own step.
"""

from __future__ import annotations

from dataclasses import replace

from dslc.compiler.ir.network_facts import CodePlace, NetworkFacts
from dslc.compiler.ir.nodes import ModelGraph
from dslc.compiler.ir.program import CutDraw, DrawStep
from dslc.compiler.ir.steps import LOSS, OUTSIDE, DrawDims
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.tensor_plan import TensorPlan
from dslc.dsl.language.job import JobSpec


def draw_step(job: JobSpec, layout: Layout, model: ModelGraph | None, cuts: TensorPlan) -> DrawStep | None:
    """Returns the step of draws by sample; None if the generators of torch draw, or nothing does."""
    if model is None or not model.noise or torch_draws_because(job, layout, model) or uncontrolled_draw(layout, model):
        return None
    facts = _network_facts(model)
    if facts is None:
        return DrawStep(pieces=tuple(cuts.drawn_pieces))
    return replace(
        _step_of(facts),
        tensor=_cut_draws(layout, model, "tensor") or (),
        context=_cut_draws(layout, model, "context") or (),
    )


def draws_of_own_step(job: JobSpec, facts: NetworkFacts | None) -> DrawStep | None:
    """Returns the step of draws by sample for a step of the user's own with these draws; None if torch draws. Of a step
    that could not be tried, as the form of its samples is not known, the runtime sees what it draws.
    """
    if job.train.dropout_generator == "torch":
        return None
    if facts is None:
        return DrawStep(kinds=(OUTSIDE,), untried=True)
    return None if facts.torch_draws is None or known_uncontrolled(facts) else _step_of(facts)


def draws_of_own_loss(job: JobSpec, layout: Layout, facts: NetworkFacts | None) -> DrawDims | None:
    """Returns the draws by sample of a loss of the user's own; None if torch draws, or nothing does."""
    if facts is None or facts.torch_draws is None or uncontrolled_loss_draw(job, layout, facts) is not None:
        return None
    return next(iter(facts.draw_dims), DrawDims(module=LOSS, dims=()))


def uncontrolled_loss_draw(job: JobSpec, layout: Layout, facts: NetworkFacts) -> tuple[CodePlace, str] | None:
    """Returns the first draw of a loss of the user's own that cannot be given by sample, and the reason."""
    place = facts.torch_draws or CodePlace(module=LOSS, kind="")
    if job.train.dropout_generator == "torch" and facts.torch_draws is not None:
        return place, "`train.dropout_generator` is `torch`"
    known = known_uncontrolled(facts)
    is_cut = layout.sizes["context"] > 1 and facts.torch_draws is not None
    if known is None and is_cut and all(draw.by_position is None for draw in facts.draw_dims):
        return (
            place,
            "a rank of the context axis has a piece of each sample, and no trial tells its part of the numbers",
        )
    return known


def _step_of(facts: NetworkFacts) -> DrawStep:
    return DrawStep(kinds=facts.draws, shared=facts.shared_draws, dims=facts.draw_dims)


def draws_by_sample(job: JobSpec, layout: Layout, model: ModelGraph) -> bool:
    """True if all that the network draws is by sample."""
    return not torch_draws_because(job, layout, model) and uncontrolled_draw(layout, model) is None


def torch_draws_because(job: JobSpec, layout: Layout, model: ModelGraph) -> str:
    """Returns the reason why torch's generators draw, whatever the network draws; "" if there is none."""
    train = job.train
    if train.dropout_generator == "torch":
        return "`train.dropout_generator` is `torch`"
    if train.compile and layout.device == "cuda" and layout.sizes["tensor"] > 1:
        return "compiled code on the tensor axis of GPUs draws by a generator of DTensor's (`train.compile`)"
    return ""


def uncontrolled_draw(layout: Layout, model: ModelGraph) -> tuple[CodePlace, str] | None:
    """Returns the first place of a network that draws what the runtime cannot give by sample, and the reason."""
    facts = _network_facts(model)
    if facts is None:
        return None
    if known := known_uncontrolled(facts):
        return known
    last = {(draw.module, n) for draw in facts.draw_dims for n, outer in enumerate(draw.outers) if outer > 1}
    for axis in ("tensor", "context"):
        if any((cut.module, cut.number) in last for cut in _cut_draws(layout, model, axis) or ()):
            reason = f"a rank of the {axis} axis has a piece of a draw whose samples follow each other within it"
            return facts.joined_draw or facts.torch_draws or CodePlace(module="", kind=""), reason
        if _cut_draws(layout, model, axis) is None and facts.torch_draws is not None:
            return facts.torch_draws, f"tracing cannot tell which of its numbers a rank of the {axis} axis has"
    return None


def known_uncontrolled(facts: NetworkFacts) -> tuple[CodePlace, str] | None:
    """Returns the first draw that no layout makes one by sample, and the reason."""
    if facts.uncontrolled_because:
        return facts.uncontrolled_draw or facts.torch_draws or CodePlace(module="", kind=""), facts.uncontrolled_because
    if facts.doubtful_draw is not None:
        return facts.doubtful_draw, "no trial tells whether its rows go sample by sample"
    return None


def _cut_draws(layout: Layout, model: ModelGraph, axis: str) -> tuple[CutDraw, ...] | None:
    """Returns the draws that the ranks of an axis share out; None if tracing does not know them."""
    if layout.sizes[axis] == 1:
        return ()
    facts = model.traced
    plan = None if facts is None else facts.shares if axis == "tensor" else facts.pieces
    return None if plan is None else plan.draws


def _network_facts(model: ModelGraph) -> NetworkFacts | None:
    return model.traced.network if model.traced is not None else None
