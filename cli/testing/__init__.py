"""Properties of jobs, for the tests of those who write them: strategies of hypothesis that vary a job or draw its plan,
and assertions on what is drawn.

    from hypothesis import given
    from hypothesis import strategies as st
    from dslc.testing import assert_accepted, vary

    @given(vary("jobs/gpt.plt", nodes=range(1, 65)))
    def test_every_size_is_accepted(variant):
        assert_accepted(variant)

It needs hypothesis: `pip install 'dslc[testing]'`. Nothing here starts a process or imports torch.
"""

from __future__ import annotations

try:
    import hypothesis  # noqa: F401
except ImportError as error:
    raise ImportError("`dslc.testing` needs hypothesis: pip install 'dslc[testing]'") from error

from dslc.testing.job_variants import JobVariant, load_variant
from dslc.testing.properties import (
    assert_accepted,
    assert_resumable,
    assert_same_training,
    assert_step_time,
    assert_within_memory,
    assume_accepted,
)
from dslc.testing.registry_strategies import job_texts, networks
from dslc.testing.variation import draw_plans, vary

__all__ = [
    "JobVariant",
    "assert_accepted",
    "assert_resumable",
    "assert_same_training",
    "assert_step_time",
    "assert_within_memory",
    "assume_accepted",
    "draw_plans",
    "job_texts",
    "load_variant",
    "networks",
    "vary",
]
