#!/usr/bin/env python
"""Flower's SuperExec as a deployment of the tests runs it: its ClientApps and ServerApps are forks of it.

A link of its name stands first on the deployment's PATH. Each app is a child of this process, has the command line of
Flower's own, and works on one message. Flower's own programs: tests/integration/test_rehearsal.py.
"""

import ctypes
import gc
import os
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

LIBC = ctypes.CDLL(None)
SET_NAME = 15  # of prctl
NEEDED = ("flwr_replay.client_app", "flwr_replay.server_app")


def started(apps, words, stdout=None, stderr=None):
    """Start one of the apps, as `subprocess.Popen` would."""
    with suppress(ChildProcessError):  # none is left
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    if os.fork():
        return
    code = 1
    try:
        for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
            signal.signal(sign, signal.SIG_DFL if sign != signal.SIGINT else signal.default_int_handler)
        for stream, given in ((1, stdout), (2, stderr)):
            if given == subprocess.DEVNULL:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        entitled(words)
        sys.argv = words
        code = apps[words[0]]() or 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def entitled(words):
    """Have this process shown with an app's command line."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    shown = "\0".join((sys.executable, *words)).encode()[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, shown, len(shown))
    LIBC.prctl(SET_NAME, words[0].encode(), 0, 0, 0)


def superexec():
    """Be a SuperExec."""
    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.superexec.executor import subprocess_executor
    from flwr.superlink.cli import flwr_serverapp
    from flwr.supernode.cli import flwr_clientapp

    apps = {"flwr-clientapp": flwr_clientapp, "flwr-serverapp": flwr_serverapp}
    for name in NEEDED:
        import_module(name)
    gc.freeze()
    subprocess_executor.subprocess = SimpleNamespace(Popen=partial(started, apps), DEVNULL=subprocess.DEVNULL)
    return flower_superexec()


if __name__ == "__main__":
    sys.path[0] = str(Path(sys.executable).parent)  # as Flower's own program has it, in place of tests/
    sys.exit(superexec())
