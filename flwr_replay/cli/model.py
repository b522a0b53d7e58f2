"""flwr-replay predict | export: use the model of a finished run."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from flwr_replay.cli.places import LAST, absolute, finished_place

__all__ = ["export", "predict"]

# Click 8.5 drops the help of Typer's arguments, so docstrings have it
Place = Annotated[str, typer.Argument(metavar="RUN")]
Institution = Annotated[str, typer.Option("--institution", help="Whose model, where each institution has its own.")]

Best = Annotated[
    bool, typer.Option("--best", help="The round that was best by its validation examples, in place of the last.")
]


def predict(
    place: Place,
    images: Annotated[str, typer.Argument(metavar="IMAGES")],
    out: Annotated[str, typer.Option("--out", help="The CSV file to write; default: print.")] = "",
    institution: Institution = "",
    run: Annotated[str, typer.Option("--run", help="In a state directory, the run's id; default: the last.")] = "",
    best: Best = False,
) -> None:
    """Predict the labels of images with the model of a finished run, as CSV with probabilities.

    RUN is a run directory, `last` for the newest in runs/, or an institution's state directory. IMAGES is a folder of
    images, a CSV file with a column image, or one image. With a column label the answer says which are right.
    """
    from flwr_replay.files.atomic import write_atomic
    from flwr_replay.finished.predict import images_in, predictions, right_in
    from flwr_replay.finished.trained import load_model

    source = absolute(images)
    folder = finished_place(place)
    if place == LAST:
        print(f"the model of {folder}", file=sys.stderr)
    model, rows = load_model(folder, institution, run, best=best), images_in(source)
    text = predictions(model, rows, source if source.is_dir() else source.parent)
    if not out:
        print(text, end="")
        return
    write_atomic(absolute(out), text)
    print(f"{len(rows)} predictions{right_in(text)}: {out}")


def export(
    place: Place,
    form: Annotated[str, typer.Option("--format", help="torch (torch.export) | onnx.")] = "torch",
    out: Annotated[str, typer.Option("--out", help="The file to write.")] = "model",
    institution: Institution = "",
    best: Best = False,
) -> None:
    """Write the model of a finished run as one file for other programs, and a model card beside it.

    RUN is a run directory, `last` for the newest in runs/, or an institution's state directory.
    """
    from flwr_replay.finished.export import card
    from flwr_replay.finished.export import export as write
    from flwr_replay.finished.trained import load_model

    folder = finished_place(place)
    model = load_model(folder, institution, best=best)
    text = card(folder, model, institution, best)
    for file in write(model, form, absolute(out), text):
        print(file)
