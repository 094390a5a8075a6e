"""`dslc predict`: a checkpoint's outputs for every sample, in order, on any devices."""

from __future__ import annotations

import argparse
import os

from dslc.compiler.ir.program import PredictMode
from dslc.dsl.plain import plain
from dslc.jobs.inference import prepare_inference, run_inference
from dslc.runs.load_one import load_trained
from dslc.terminal.exit_codes import GOOD, TRAINING_FAILED, CommandFailedError
from dslc.terminal.system_errors import in_words


def main(arguments: argparse.Namespace) -> int:
    output = os.path.abspath(arguments.output)
    if not output.endswith((".npz", ".safetensors")):
        raise CommandFailedError("predictions are written as .npz or .safetensors")
    folder = os.path.dirname(output)
    if not os.path.isdir(folder):
        raise CommandFailedError(plain(f"there is no folder {folder}"))
    loaded, weights = load_trained(arguments.job, arguments.settings, arguments.checkpoint)
    ready, selected = prepare_inference(
        loaded, weights or arguments.checkpoint, PredictMode, split=arguments.split, output=output, raw=arguments.raw
    )
    data = ready.program.data
    if arguments.split in ("validation", "test") and not getattr(data, f"{arguments.split}_samples"):
        raise CommandFailedError(
            f"the job holds no samples out for its {arguments.split}: `--split train` or `--split all`"
        )
    if arguments.split in ("train", "all") and data.stream is not None:
        raise CommandFailedError("a stream has no samples to number: `--split validation`")
    with run_inference(ready, beside=folder) as parts:
        from dslc.runtime.loop.predictions import join

        try:
            shapes = join(parts, ready.program.world_size, output)
        except OSError as error:
            raise CommandFailedError(plain(in_words(error)), TRAINING_FAILED) from error
        except ValueError as error:
            raise CommandFailedError(plain(f"{output} cannot be written: {error}"), TRAINING_FAILED) from error
    shapes_text = ", ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in shapes.items())
    print(plain(f"{arguments.output}: {shapes_text} of {selected}"))
    return GOOD
