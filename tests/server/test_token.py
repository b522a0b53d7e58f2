"""What a coordinator reads when Flower takes back the token of the process that a run is in."""

import httpx
import pytest
from flwr.app import Context, RecordDict
from flwr.supercore.run import RunNotRunningException
from grid import Grid

from flwr_replay.client_app import app
from flwr_replay.errors import RunError
from flwr_replay.server_app import ENDED, main

ANSWER = httpx.Response(401, request=httpx.Request("POST", "http://127.0.0.1/v1/runtime/get-nodes"))
EXPIRED = httpx.HTTPStatusError("Client error '401 Unauthorized'", request=ANSWER.request, response=ANSWER)
GONE = httpx.HTTPStatusError("gone", request=ANSWER.request, response=httpx.Response(410, request=ANSWER.request))


def run_server_app(tmp_path, error):
    """Run the ServerApp on a grid that fails from its second look for nodes on."""

    def there(grid):
        if grid.looks > 2:
            raise error

    options = {"strategy": "fedavg", "task": "digits", "overrides": f"model=mlp nodes=2 runs_dir='{tmp_path}'"}
    grid = Grid.simulated(app, {"overrides": f"strategy=fedavg {options['overrides']}"}, 2, state=str(tmp_path / "s"))
    grid.there = there
    main(grid, Context(1, 1, {}, RecordDict(), options))


@pytest.mark.parametrize(
    ("error", "raised"),
    [(EXPIRED, RunError), (RunNotRunningException(), RunError), (SystemExit(0), SystemExit)],
)
def test_an_expired_token_is_one_line_that_says_what_to_do(error, raised, tmp_path, caplog):
    with pytest.raises(raised) as ended:
        run_server_app(tmp_path, error)
    assert "\n" not in ENDED
    if raised is RunError:  # which Flower logs, in one line
        assert str(ended.value) == ENDED
        assert ended.value.__suppress_context__
    else:
        assert f"error: {ENDED}" in caplog.messages


def test_another_fault_is_not_taken_for_it(tmp_path, caplog):
    with pytest.raises(httpx.HTTPStatusError, match="gone"):
        run_server_app(tmp_path, GONE)
    assert not [line for line in caplog.messages if "token" in line]
