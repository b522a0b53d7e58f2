"""The ServerApp: compose the configuration, build the strategy, start it, write the run directory."""

from __future__ import annotations

import logging

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flwr_replay.config.compose import from_run_config
from flwr_replay.errors import FlwrReplayError
from flwr_replay.report.progress import LogDisplay
from flwr_replay.report.run_page import write_run_page
from flwr_replay.report.summary import summary
from flwr_replay.runs.execute import execute

__all__ = ["app"]

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the options of Flower's run config; a user's mistake is logged in one line, and the run fails.

    It must end with an `Exception`: if the process just exits, Flower waits for it and reports no reason.
    """
    try:
        result, folder = execute(grid, from_run_config(context.run_config), LogDisplay())
    except (FlwrReplayError, OSError) as error:
        logging.getLogger("flwr").error("error: %s", " ".join(str(error).split()))
        raise error.with_traceback(None) from None
    write_run_page(folder)
    print(summary(result, folder))
