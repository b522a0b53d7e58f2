"""The command `privacy attack`: what an honest-but-curious server makes of a run's recorded messages."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from flwr_replay.cli.places import AsJson, answer, finished_place, say

__all__ = ["attack"]


def attack(
    place: Annotated[str, typer.Argument(metavar="RUN")],
    institution: Annotated[str, typer.Option("--institution", help="Attack this one only.")] = "",
    field: Annotated[str, typer.Option("--field", help="Attack this field only: latents, arrays, codes …")] = "",
    only: Annotated[
        str,
        typer.Option(
            "--attack", help="Try this one only: 'latent matching', 'loss threshold' … | yours: mypkg:attack."
        ),
    ] = "",
    aux: Annotated[
        str,
        typer.Option(
            "--aux",
            help="The attacker's own images. none | undealt: those of a simulation's data set that no institution has "
            "| an institution's name: it colludes | a data folder.",
        ),
    ] = "none",
    data: Annotated[
        str, typer.Option("--data", help="The judge's originals: the institution's own data; empty: a simulation's.")
    ] = "",
    run: Annotated[
        str, typer.Option("--run", help="In an institution's state: the run's id; empty: the last recorded one.")
    ] = "",
    minutes: Annotated[float, typer.Option("--minutes", help="For all attacks together, about.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Attack a run's recorded messages; write RUN/attacks with figures, pictures of patients, and a page.

    RUN is a run directory with recorded messages (record=all), `last` for the newest in runs/, or an institution's own
    state.

    An interrupted command goes on where it stopped. A failed attack proves nothing.
    """
    from flwr_replay.lab.attack import FOLDER, attack_run
    from flwr_replay.lab.page import write_page
    from flwr_replay.lab.registry import Only

    folder = finished_place(place)
    tell = say if as_json else partial(print, flush=True)
    report = attack_run(folder, Only(institution, field, only), aux, data, minutes, tell, run)
    page = write_page(folder / FOLDER, report)
    if as_json:
        answer(report, "", as_json)
    tell(f"{page}: shows patients; a failed attack proves nothing")
