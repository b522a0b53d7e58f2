"""Commands and workers in forks of this process, which has all imported.

None may speak to Ray itself: where this process has done so, its threads are missing in a fork, which waits for ever.
"""

import logging
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import time
import traceback
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, ForkProcess

import torch

from flwr_replay.cli.main import main


def work(words, output, errors=None, before=lambda: None):
    """Run the command line in this forked process, and return its exit code; what it says goes to files."""
    torch.set_num_threads(1)  # before any work: if this process had threads, a fork waits for them for ever
    code = 99
    try:
        for descriptor, file in ((1, output), (2, output if errors is None else errors)):
            os.dup2(file, descriptor)
        sys.stdout, sys.stderr = (os.fdopen(at, "w", buffering=1, closefd=False) for at in (1, 2))  # not pytest's
        for handler in logging.getLogger("flwr").handlers:
            handler.setStream(sys.stderr)
        sys.argv = ["flwr-replay", *words]
        before()
        main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return code


class Command:
    """A command in a fork, to be used as `subprocess.Popen` of an interpreter of its own.

    Parameters
    ----------
    words : list of str
        After `flwr-replay`.
    folder : Path
        Where it works.
    apart : bool
        What it prints is thrown away; what it says on its way can be read. If false, both can.
    own_session : bool
        It leads a process group, which can be sent signals.
    environment : str
        Variables of its own.
    """

    returncode = None

    def __init__(self, words, folder, apart=False, own_session=False, **environment):
        reads, saying = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            code = 1
            try:
                os.close(reads)
                if own_session:
                    os.setsid()
                for sign in (signal.SIGINT, signal.SIGTERM):  # a job in the background ignores Ctrl-C
                    signal.signal(sign, signal.default_int_handler if sign == signal.SIGINT else signal.SIG_DFL)
                os.chdir(folder)
                os.environ.update(environment)
                code = work(words, os.open(os.devnull, os.O_WRONLY) if apart else saying, saying)
            finally:
                os._exit(code)
        os.close(saying)
        self.output = os.fdopen(reads)

    def poll(self):
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout=600):
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("flwr-replay", timeout)
            time.sleep(0.02)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def rest(self):
        """Wait for its end, and of all that say something in its name; return what was not read yet."""
        rest = self.output.read()
        self.wait()
        return rest


class Worker(ForkProcess):
    """What `multiprocessing` would spawn: of pipes it has its own end only, so that each notices the other's end."""

    def run(self):
        own = {argument.fileno() for argument in self._args if isinstance(argument, Connection)}
        for descriptor in {*map(int, os.listdir("/proc/self/fd"))} - own:
            try:
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    os.close(descriptor)
            except OSError:  # of the listing itself
                continue
        torch.set_num_threads(1)
        super().run()


class Forks(ForkContext):
    """Stands in for the context `spawn`."""

    Process = Worker


def forking(patch):
    """Have forked, instead of spawned, what `multiprocessing` starts: an interpreter imports torch for seconds."""
    patch.setattr(multiprocessing, "get_context", lambda method: Forks())


def begun_together(target, *args):
    """Run a function in four forks that wait for one event; return how often they have counted.

    It is called with the event, a counter, and `args`.
    """
    forked = multiprocessing.get_context("fork")
    begin, counted = forked.Event(), forked.Value("i", 0)
    workers = [forked.Process(target=target, args=(begin, counted, *args)) for _ in range(4)]
    for worker in workers:
        worker.start()
    begin.set()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    return counted.value
