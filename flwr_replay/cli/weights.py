"""flwr-replay weights: published weights of a pretrained encoder, fetched ahead."""

import shlex
from typing import Annotated

import typer

from flwr_replay.cli.places import AsJson, answer, say

__all__ = ["app"]

app = typer.Typer(help="Fetch a pretrained encoder's published weights.", no_args_is_help=True)


@app.command()
def get(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    to: Annotated[str, typer.Option("--to", help="Where to put them; default: NAME.safetensors.")] = "",
    as_json: AsJson = False,
) -> None:
    """Download the published weights of timm's NAME, such as resnet18.a1_in1k, to a file.

    On a machine without a network: run this on another one, copy its file, and give that, model.weights=FILE.
    """
    say()
    from flwr_replay.models.hub import fetch

    weights = fetch(name, to)
    lines = [
        f"{weights.file}{'' if weights.new else ' was there already'}",
        f"SHA-256 {weights.sha256}, {weights.size:,} bytes, licence: {weights.licence}",
        f"In a run: model=timm model.name={weights.name} {shlex.quote(f'model.weights={weights.file}')}",
        f"""In a deployment, at each institution: --node-config '… weights="{weights.file}"'""",
    ]
    answer(weights, "\n".join(lines), as_json)
