"""``mpitrain evaluate`` and ``mpitrain predict``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import click
import numpy as np

from ..core.files import writing
from ..core.layout import Array
from ..core.words import one_line
from ..data.files import first_bytes, foreign
from ..errors import DataError
from ..plan.options import examples

_PATH = click.Path(path_type=Path)
_RUN_HELP = "RUN is a run directory (uses its newest checkpoint), RUN/best, or a checkpoint in a run directory."


@click.command(
    help="Measure loss, accuracy and metrics of a trained model on the job's validation examples, as in training.\n\n"
    f"{_RUN_HELP} The default is the latest run in the folder runs. If the job has moving averages, these "
    "are evaluated.",
    epilog=examples("mpitrain evaluate", "mpitrain evaluate runs/mnist_mlp-20261121-141119/best"),
)
@click.argument("run", required=False, type=_PATH)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def evaluate(run: Path | None, as_json: bool) -> None:
    """Print one line."""
    from ..inference.model import evaluate as measure
    from ..monitor.console import describe, print_wrapped
    from ..report.runs import latest_run

    step, values = measure(run or latest_run())
    if as_json:
        click.echo(json.dumps({"step": step, **values}))
    else:
        parts = [describe(name, value) for name, value in values.items()]
        print_wrapped(f"step {step:,}: " + "  ".join(parts), error=False)


@click.command(
    help="Write a trained model's outputs for the examples in a file.\n\n"
    f"{_RUN_HELP} Examples have the form in which the training data stores them or, if "
    "it has transforms (map), the form that the transforms return. The run must be the run of a job file.",
    epilog=examples("mpitrain predict runs/mnist_mlp-20261121-141119 --input x.npy --output y.npy"),
)
@click.argument("run", type=_PATH)
@click.option(
    "--input",
    "given",
    type=_PATH,
    required=True,
    metavar="FILE",
    help="Examples: a .npy file, or for a PyTorch module with several inputs a .npz file with an array for each.",
)
@click.option("--output", type=_PATH, required=True, metavar="FILE", help="The .npy file to write.")
@click.option("--averages", is_flag=True, help="Use the moving averages of the parameters.")
def predict(run: Path, given: Path, output: Path, averages: bool) -> None:
    """Write the outputs, shape (examples, ...)."""
    from ..inference.model import Predictor
    from ..inference.restore import restore

    if output.exists():
        raise DataError(f"{output} already exists; remove it, or pass another --output")
    examples = _read(given)
    outputs = Predictor(restore(run, averages=averages))(examples)
    with writing(output, "--output", DataError), output.open("xb") as file:
        np.save(file, outputs)
    click.echo(f"wrote {output}: shape {outputs.shape}, {outputs.dtype}")


def _read(path: Path) -> Array | Mapping[str, Array]:
    """Return the array of a .npy file, or the arrays of a .npz file by name; executes no code from the file.

    Raises:
        DataError: The file cannot be read, is not a .npy or .npz file, or has values that are not numbers.
    """
    try:
        with open(path, "rb") as file:
            loaded = np.load(file, allow_pickle=False)
            arrays = loaded if isinstance(loaded, np.ndarray) else dict(loaded)
            if isinstance(loaded, np.ndarray) and file.read(1):
                raise ValueError("there are bytes after the array")
    except OSError as error:
        raise DataError(f"--input {path} cannot be read: {error.strerror or error}") from error
    except Exception as error:
        reason, what = one_line(error), foreign(first_bytes(path))
        if what is not None and not what.startswith(("is a NumPy", "is a zip")):
            raise DataError(f"--input {path} {what}") from error
        if "pickle" in reason:  # for files of other formats, NumPy suggests unpickling
            reason = "save arrays of numbers with numpy.save; images must be decoded first"
        raise DataError(f"--input {path} is not a .npy or .npz file of numbers: {reason}") from error
    if isinstance(arrays, dict) and not arrays:
        raise DataError(f"--input {path} has no arrays: must have at least one")
    kinds = {array.dtype.kind for array in (arrays.values() if isinstance(arrays, dict) else [arrays])}
    if not kinds <= set("biuf"):
        raise DataError(f"--input {path} has values that are not numbers: must have integers or floating-point numbers")
    return arrays
