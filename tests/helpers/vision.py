"""Imports torchvision's transforms, once for all trainings of tests, beside whichever build of torch."""

from dslc.runtime.process.vision_library import let_torchvision_load

let_torchvision_load()

import torchvision.transforms.v2  # noqa: E402, F401
