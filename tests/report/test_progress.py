"""What a terminal of 80 columns shows of a run: rounds that stay, log lines that are whole, a bar that goes."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

from flwr_replay.report.progress import LogDisplay, Progress

SCRIPT = """
import logging, time
import flwr.common.logger
from flwr_replay.report.progress import Progress, TerminalDisplay, without_colours
without_colours()
display = TerminalDisplay()
display.begin(Progress("cwt", 2, 2, 0))
for exchange in range(1, 5):
    time.sleep(0.15)  # the bar is drawn ten times a second
    logging.getLogger("flwr").warning("north takes no part in exchange %s", exchange)
    display.exchange(exchange, {"accuracy": exchange / 8, "loss": 1.0}, 1000, 1.0)
display.close()
logging.getLogger("flwr").warning("after the run")
"""
COLOUR = re.compile(r"\x1b\[[\d;]*m|\x1b\[\?25[hl]|\r")


def test_a_resumed_run_knows_the_time_left_from_its_first_exchange(monkeypatch):
    display = LogDisplay()
    display.begin(Progress("cwt", rounds=10, per_round=1, done=6, began=10.0))
    monkeypatch.setattr("time.monotonic", lambda: 14.0)
    assert display.remaining(7) == "  remaining 0:00:12"
    assert display.remaining(10) == "  testing"


def test_a_pipe_gets_no_colours():
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert "\x1b" not in ended.stderr
    assert ended.stderr.count("takes no part in exchange") == 4


def test_no_color_is_heeded_on_a_terminal(monkeypatch):
    assert any("\x1b[93mWARNING" in line for line in on_a_terminal(80, plain=False))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not any("\x1b[93mWARNING" in line for line in on_a_terminal(80, plain=False))


def on_a_terminal(columns: int, plain: bool = True) -> list[str]:
    """Return the lines that stay, since each is written after the bar's line was erased."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    got = b""
    try:
        while chunk := os.read(ours, 65536):
            got += chunk
    except OSError:  # Linux's way to say that the other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0, got.decode()
    lines = [line.split("\x1b[2K")[-1] for line in got.decode().split("\n")]
    return [COLOUR.sub("", line) for line in lines] if plain else lines


def test_rounds_stay_and_log_lines_are_whole():
    lines = on_a_terminal(80)
    assert max(map(len, lines)) <= 80
    rounds = [line for line in lines if line.startswith("round ") and "accuracy" in line]
    assert rounds == [
        "round 1/2  accuracy 0.2500, loss 1.0000  1 kB  0:00:01",
        "round 2/2  accuracy 0.5000, loss 1.0000  1 kB  0:00:01",
    ]
    logged = [line for line in lines if "takes no part" in line]
    assert logged == [f"WARNING :   north takes no part in exchange {exchange}" for exchange in (1, 2, 3, 4)]
    assert "WARNING :   after the run" in lines


def test_the_time_is_left_out_where_it_would_not_fit():
    lines = on_a_terminal(50)
    assert "round 1/2  accuracy 0.2500, loss 1.0000  1 kB" in lines
