"""The ServerApp: compose the configuration, build the strategy, start it, write the run directory."""

import logging

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flwr_replay.config.compose import compose_own, overrides_in
from flwr_replay.config.own_code import users_code
from flwr_replay.config.quoting import key_of
from flwr_replay.engines.simulate import refuse_resources
from flwr_replay.errors import FlwrReplayError, RunError
from flwr_replay.processes import wake_with_parent
from flwr_replay.report.progress import LogDisplay
from flwr_replay.report.run_page import PAGE, write_run_page
from flwr_replay.report.summary import summary
from flwr_replay.report.templates import spared
from flwr_replay.runs.execute import execute
from flwr_replay.server.asking import deployed
from flwr_replay.server.one_line import errors_in_one_line
from flwr_replay.terminal import wrapped

__all__ = ["app"]

ENDED = (
    "Flower has ended this run: it was stopped, its SuperLink is gone, or its task token expired, which happens after "
    "a minute without a sign of life from this process; if nobody stopped it, run fewer processes on this machine, and "
    "resume it: flwr run … --run-config RUN-DIRECTORY/resume.toml"
)
SHOWN = 80  # columns of the summary: `flwr run --stream` shows it on some terminal
REFUSED = (401, 403)  # HTTP's codes for a token that is not, or no longer, valid

app = ServerApp()
errors_in_one_line()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the options of Flower's run config; a user's mistake is one line of Flower's log, and the run fails.

    It must end with an `Exception`: if the process just exits, Flower waits for it and reports no reason.
    """
    if deployed(grid):
        wake_with_parent()
    try:
        typed = {key_of(override): override for override in overrides_in(context.run_config)}  # by whoever started it
        config = compose_own([*typed.values()], () if "resume" in typed else [*typed.values()])
        refuse_resources(config)
        run_config = context.run_config if deployed(grid) else {}
        with users_code(FlwrReplayError):
            result, folder = execute(grid, config, LogDisplay(), run_config)
    except (KeyboardInterrupt, SystemExit):  # so Flower ends the process whose token it refuses, or that was stopped
        logging.getLogger("flwr").error("error: %s", ENDED)
        raise
    except BaseException as error:  # Flower's RunNotRunningException is no Exception
        fault = RunError(ENDED) if token_refused(error) else error
        if not isinstance(fault, FlwrReplayError | OSError):
            raise
        error = fault if isinstance(fault, FlwrReplayError) else RunError(str(fault))
        raise error from None
    with spared(folder / PAGE):
        write_run_page(folder)
    print(wrapped(summary(result, folder), SHOWN))


def token_refused(error: BaseException) -> bool:
    """Say whether Flower no longer accepts this process's token: its HTTP code, or the exception made of it."""
    code = getattr(getattr(error, "response", None), "status_code", None)
    return code in REFUSED or type(error).__name__ == "RunNotRunningException"
