#!/usr/bin/env python
"""Flower's SuperExec and SuperNode as a deployment of the tests runs them: nothing else waits, or is imported twice.

Links of their names stand first on the deployment's PATH. The ClientApps and ServerApps of a SuperExec are forks of it.
Each is a child of that process, has the command line of Flower's own, and works on one message. A SuperNode that has
found no message looks again sooner. Flower's own programs: tests/integration/test_rehearsal.py.
"""

import ctypes
import gc
import os
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

LIBC = ctypes.CDLL(None)
SET_NAME = 15  # of prctl
NEEDED = ("flwr_replay.client_app", "flwr_replay.server_app")
SOONER = 6  # times


def started(apps, words, stdout=None, stderr=None):
    """Start one of the apps, as `subprocess.Popen` would."""
    with suppress(ChildProcessError):  # none is left
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    if os.fork():
        return
    code = 1
    try:
        for one in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
            signal.signal(one, signal.SIG_DFL if one != signal.SIGINT else signal.default_int_handler)
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


def supernode():
    """Be a SuperNode."""
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli import flower_supernode

    start_client_internal.time = SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / SOONER))
    return flower_supernode()


if __name__ == "__main__":
    sys.path[0] = str(Path(sys.executable).parent)  # as Flower's own program has it, in place of tests/
    sys.exit({"flower-superexec": superexec, "flower-supernode": supernode}[Path(sys.argv[0]).name]())
