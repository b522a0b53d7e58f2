"""Two machines of a Ray cluster on this one, each with GPUs that Ray only believes in."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from flwr_replay.engines.superlink import free_port
from flwr_replay.processes import MARK, family, members

RAY = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block"]
# Two seconds of silence mean that a machine has died.
HEALTH = '{"health_check_period_ms":500,"health_check_failure_threshold":4,"health_check_initial_delay_ms":0}'
TUNED = {"RAY_worker_niceness": "0", "RAY_raylet_start_wait_time_s": "120"}  # on a busy machine, too
PORTS = ("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0")
HEAD, SECOND = 3, 2  # cores and GPUs


class Machines:
    """The head, and a second machine that can be killed and started again."""

    def __init__(self, stack):
        self.stack, self.port = stack, free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # short: sockets lie in it
        stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.second = ""
        head = ["--head", f"--port={self.port}", f"--ray-client-server-port={free_port()}", "--include-dashboard=false"]
        self.head = self._start(HEAD, *head, f"--temp-dir={self.folder}", f"--system-config={HEALTH}")
        self._await(1)

    def start_second(self, **environment):
        self.second = self._start(SECOND, f"--address={self.address}", **environment)
        self._await(2)

    def kill_second(self):
        for process in members(self.second):
            process.kill()

    def _start(self, size, *words, **environment):
        mark = self.stack.enter_context(family())
        command = [*RAY, *words, f"--num-cpus={size}", f"--num-gpus={size}", *PORTS, "--disable-usage-stats"]
        command += ["--include-log-monitor=false"]
        with open(self.folder / f"{mark}.log", "w") as log:
            environment = {**os.environ, **environment, MARK: mark, **TUNED}
            subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        return mark

    def _await(self, machines):
        """Wait until so many raylets say that they are ready."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            logs = [self.folder / f"{mark}.log" for mark in (self.head, self.second) if mark]
            if sum("Ray runtime started" in log.read_text() for log in logs) == machines:
                return
            time.sleep(0.1)
        raise AssertionError("\n".join(log.read_text() for log in logs))

    def actors(self, kind="_Served"):
        """Return the processes of a class's actors; by default this package's."""
        processes = [*members(self.head), *(members(self.second) if self.second else [])]
        return [process for process in processes if process.is_running() and kind in title(process)]


def title(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@contextmanager
def machines():
    with ExitStack() as stack:
        yield Machines(stack)
