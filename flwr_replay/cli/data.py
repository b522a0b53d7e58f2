"""flwr-replay data show | images | convert | manifest | check: what is done with data before a run."""

import sys
from typing import Annotated

import typer

from flwr_replay.cli.places import AsJson, Options, absolute, answer, say
from flwr_replay.errors import one_line

__all__ = ["app"]

app = typer.Typer(
    help="Show a data set and how it is dealt; write images of it; convert a clinical set; check a folder.",
    no_args_is_help=True,
)


@app.command("show")
def show(
    options: Options = None,
    out: Annotated[
        str | None, typer.Option("--out", help="A folder for a picture of it; without it nothing is written.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print each institution's label counts, and how far the labels of any two differ (KS and TV)."""
    from flwr_replay.data.dealt import loaded
    from flwr_replay.data.show import show as describe
    from flwr_replay.data.skew import label_histogram
    from flwr_replay.engines.simulate import Simulation
    from flwr_replay.runs.options import resolve

    _, config = resolve(options or [], ".", "")
    data, partition = loaded(config.task), Simulation.of(config).partition
    text = describe(data, partition, absolute(out) if out else None)
    values, counts_KC = label_histogram([data.train.labels[own] for own in partition.train])
    counts = dict(zip(partition.names, counts_KC.tolist(), strict=True))
    labels = [data.classes[value] if data.classes else value for value in values.tolist()]
    splits = {"train": partition.train, "val": partition.val, "test": partition.test}
    sizes = {split: dict(zip(partition.names, map(len, own), strict=True)) for split, own in splits.items() if own}
    answer({"examples": sizes, "labels": labels, "counts": counts, "skew": partition.skew}, text, as_json)


@app.command("images")
def images(
    out: Annotated[str, typer.Argument(metavar="DIR")],
    options: Options = None,
    count: Annotated[int, typer.Option("--count", help="How many images.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Write test images of a task to the folder DIR as PNG files, a folder for each label: try `predict` on them.

    No run trains on test images. Without options: of scikit-learn's digits.
    """
    from flwr_replay.data.dealt import loaded
    from flwr_replay.data.show import write_images
    from flwr_replay.runs.options import resolve

    task, folder = resolve(options or [], ".", "")[1].task, absolute(out)
    written = write_images(loaded(task).test, task, count, folder)
    text = f"{written} test images of {task.name}, a folder for each label: {folder}"
    answer({"images": written, "folder": folder}, text, as_json)


@app.command("convert")
def convert(name: str, folder: str, as_json: AsJson = False) -> None:
    """List a clinical set's unpacked download in FOLDER/manifest.csv, once; task=NAME task.data-dir=FOLDER reads it.

    NAME is retina, boneage, brats, isic or tuberculosis.
    """
    from flwr_replay.convert import convert as write_manifest

    manifest = write_manifest(name, absolute(folder))
    answer({"manifest": manifest}, str(manifest), as_json)


SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave such images out of the manifest, and list them.")]


@app.command("manifest")
def manifest(
    folder: str,
    patients: Annotated[str, typer.Option("--patients", help="A CSV file of your archive, a row an image.")],
    id_column: Annotated[str, typer.Option("--id", help="Its column with the patients.")],
    file_column: Annotated[str, typer.Option("--file", help="Its column with the images' file names.")] = "file",
    skip_bad: SkipBad = False,
    as_json: AsJson = False,
) -> None:
    """Write FOLDER/manifest.csv for a folder of class folders, so that a patient's images are kept together.

    Images without a row, rows without an image, and images with two patients are listed. Nothing is written then, or
    with --skip-bad a manifest without these images, and FOLDER/left-out.csv, which says why.
    """
    from flwr_replay.convert import link

    faults, written = link(absolute(folder), absolute(patients), id_column, file_column, skip_bad)
    for rule, bad in faults.items():
        say("\n  ".join(one_line(line) for line in (f"{rule}; {len(bad):,} wrong:", *bad)))
    if not written:
        say("nothing was written: mend this, name other columns by --file and --id, or leave images out by --skip-bad")
    if written or as_json:
        answer({"manifest": written, "faults": faults}, str(written), as_json)
    sys.exit(0 if written else 2)


@app.command("check")
def check(folder: str, skip_bad: SkipBad = False, as_json: AsJson = False) -> None:
    """Look at every image in FOLDER: which cannot be read, which are the same, sizes, modes, classes, patients.

    FOLDER is as for task=folder. Exit code 1: something should be mended before training. --skip-bad writes
    FOLDER/manifest.csv without files that cannot be read, and FOLDER/left-out.csv, which says why.
    """
    from flwr_replay.convert.checked import checked

    folder_check = checked(absolute(folder), skip_bad)
    answer(folder_check._asdict(), "\n".join(folder_check.lines), as_json)
    sys.exit(0 if folder_check.sound else 1)
