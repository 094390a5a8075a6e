"""The figures of an analysis for an editor: the cost of each layer, and of a rank, as text from the compiler."""

from __future__ import annotations

from dslc.dsl.record import Record, record


@record
class LayerFigures(Record):
    """The layers that one call of the job makes. `region` is the text of the statement that holds it, and `start` to
    `end` its characters there, so that a change of other statements moves nothing.
    """

    region: str
    start: int
    end: int
    kind: str
    count: int
    input: str
    output: str
    parameters: str
    forward: str
    backward: str
    saved: str


@record
class JobFigures(Record):
    """The plan of a job in numbers; "" for those that are unknown."""

    layers: tuple[LayerFigures, ...] = ()
    ranks: str = ""
    batch: str = ""  # samples of a rank in a step
    microbatch: str = ""
    parameters: str = ""
    peak: str = ""
    step_time: str = ""
