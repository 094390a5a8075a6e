"""How many operations of torch a layer of the library is in a forward pass on CPUs, by which a fit prices it.

Views are not counted, as they compute nothing. Traced networks have theirs counted (compiler/trace/trace_model.py); a
test holds these numbers against such counts.
"""

from __future__ import annotations

# Of a layer itself, without the layers within it; of others one.
OPERATIONS = {
    "flatten": 0,
    "batch_norm": 3,
    "rms_norm": 6,
    "dropout": 4,
    "lstm": 7,
    "moe": 26,
    "patch_embedding": 2,
    "transformer_block": 2,
    "llama_block": 2,
}
ROTATION, LLAMA3_SCALING = 21, 10  # of attention: rotary positions, and the scaling of Llama 3
WINDOW = 9  # of attention: a mask
