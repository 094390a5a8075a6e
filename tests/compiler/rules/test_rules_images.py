"""What pictures go through: the messages name the augmentations that they are about."""

from __future__ import annotations

from helpers.job_texts import job_text

from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.rules.data.images import check_pictures
from dslc.dsl.meaning.load import load_text


def test_the_picture_step_after_several_erasures_is_named() -> None:
    steps = "random_erasing(), random_erasing(), gaussian_blur(3)"
    source = f'mnist("none", normalize = normalize(mean = [0.5], std = [0.5]), augment = [{steps}])'
    job = load_text(job_text(data={"source": source, "batch": 8}, train={"steps": 5})).job
    assert job is not None
    found = list(check_pictures(job, SourceFacts(input=TensorFact(shape=(1, 28, 28), dtype="float32"))))
    messages = {diagnostic.message for diagnostic in found if diagnostic.code == "E0335"}
    assert messages == {"`random_erasing` works on normalised numbers, and `gaussian_blur` after it on a picture"}
