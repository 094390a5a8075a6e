"""Bounds on a job for `dslc check`, so that no text, however it was made, makes it slow, large or talkative.

`dslc check` may read other people's jobs. Each bound is far above a training's needs, and each has a diagnostic with
the bound and the remedy. Within all of them a check takes less than 2 s of one core and 300 MB;
`tests/cli/test_hostile.py` checks that. (`plan` and `render` prove and draw each pass of a step, several times over:
for the largest allowed step this takes about 10 s. The search for `auto` has bounds of its own, and takes about as
long: compiler/rules/choice/search.py.)
"""

from __future__ import annotations

from typing import NamedTuple


class Bound(NamedTuple):
    """At most `most` of something; `code` is the diagnostic above it."""

    most: int
    code: str
    what: str


BYTES = Bound(2**20, "E0031", "bytes of text, in the job and all files that it imports")
WORDS = Bound(40_000, "E0032", "words and signs in them: names, numbers, brackets, line ends, comments")
SETTINGS = Bound(1_000, "E0031", "settings of the command line (`--set`)")
SETTING_BYTES = Bound(2**16, "E0031", "characters in all of them")
IMPORTS = Bound(500, "E0033", "files that a job imports")
IMPORT_DEPTH = Bound(50, "E0033", "imports between the job and a file")
NESTING = Bound(100, "E0028", "brackets, calls, lists and operations inside one another, in one value")
OPENED = Bound(120, "E0143", "the same, with the values of its params in it")
VALUES = Bound(30_000, "E0034", "values that all fields hold when each param is written out where it is used")
MISTAKES = Bound(100, "E0035", "mistakes that are reported of one job")
DEVICES = Bound(2**20, "E0036", "devices of a job")
ACTIONS = Bound(2**14, "E0413", "forward and backward passes in a step: 2 x stages x micro-batches")
LOOKS = Bound(250, "E0037", "combinations of a sweep, and counts of nodes of an elastic job, together")
WORDS_LOOKED_AT = Bound(400_000, "E0037", "words and values of the job, times the combinations of its sweep")
LAYERS = Bound(1_000, "E0221", "layers of a network, with `repeat` written out")
WORK = Bound(5_000, "W0614", "layers of the network, over all combinations and counts of nodes whose costs differ")
TRIED = Bound(4_000, "E0501", "layers of the network, over all changes that are tried where its memory does not fit")
PATTERNS = Bound(200, "E0136", "patterns of one field (`freeze`, `no_decay`, `tensor_plan`, those of `pretrained`)")
PATTERN = Bound(200, "E0135", "characters of a pattern")
SHARDS = Bound(1_000, "E0712", "files of weights that an index names")
TENSORS = Bound(50_000, "E0712", "tensors in the files of a network's weights")
PLAN = Bound(2**26, "E1001", "bytes of a plan file")
HEADER = Bound(8 * 2**20, "E0712", "bytes in the header of a `.safetensors` file of weights")
CATALOGUE = Bound(2**20, "E0421", "bytes in a hardware catalogue")

ALL = tuple(value for value in dict(globals()).values() if isinstance(value, Bound))
