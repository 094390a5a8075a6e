"""The outputs that a prediction takes."""

from __future__ import annotations

import pytest
import torch

from dslc.runtime.loop.tasks import OutputError, _rows


def test_an_output_of_complex_numbers_is_refused() -> None:
    assert _rows(torch.ones(3, 2), 3)["output"].shape == (3, 2)
    with pytest.raises(OutputError, match=r"`b` of the output has complex numbers, .* `torch.view_as_real`"):
        _rows({"a": torch.ones(3, 2), "b": torch.ones(3, dtype=torch.complex64)}, 3)
