"""A family of processes ends with the one that opened it, whoever in between has died before."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from deployed import until

from flwr_replay import processes
from flwr_replay.processes import GRACE, MARK, end_those_left, family, members

# A child in a session of its own, which starts a grandchild that may ignore SIGTERM, and may end before it.
CHILD = """
import subprocess, sys, time
grand = "import signal, time; signal.signal(15, signal.%s); print(1, flush=True); time.sleep(600)" % sys.argv[2]
grandchild = subprocess.Popen([sys.executable, "-c", grand], start_new_session=True, stdout=subprocess.PIPE)
grandchild.stdout.readline()
print(grandchild.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""
OPENER = f"""
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background ignores
from flwr_replay.processes import MARK, family
with family() as mark:
    environment = {{**os.environ, MARK: mark}}
    words = [sys.executable, "-c", {CHILD!r}, *sys.argv[1:]]
    child = subprocess.Popen(words, env=environment, start_new_session=True)
    print(mark, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("by", "stays", "when_asked"),
    [(signal.SIGKILL, 0, "SIG_IGN"), (signal.SIGKILL, 600, "SIG_DFL"), (signal.SIGINT, 0, "SIG_DFL")],
)
def test_a_family_ends_with_the_one_that_opened_it(by, stays, when_asked):
    words = [sys.executable, "-c", OPENER, str(stays), when_asked]
    opener = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    mark, grandchild = (opener.stdout.readline().strip() for _ in range(2))
    if not stays:
        while len(members(mark)) > 1:
            time.sleep(0.05)
    processes = members(mark)
    assert int(grandchild) in {process.pid for process in processes}
    opener.send_signal(by)
    opener.wait(timeout=4 * GRACE)
    assert not psutil.wait_procs(processes, timeout=4 * GRACE)[1]
    assert not members(mark)


def test_other_families_are_let_alone():
    with family() as mark:
        outer = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, MARK: mark}
        )
        with family() as other:
            assert not members(other)
        assert outer.poll() is None
        assert [process.pid for process in members(mark)] == [outer.pid]
    assert outer.wait() is not None


WAITS = """
import os, signal, threading, time
from flwr_replay.processes import wake_with_parent

signal.signal(signal.SIGINT, lambda *_: os._exit(7))
lock = threading.Lock()
lock.acquire()
parent = os.getppid()


def raise_it():
    while os.getppid() == parent:
        time.sleep(0.1)
    signal.raise_signal(signal.SIGINT)


threading.Thread(target=raise_it, daemon=True).start()
if WAKES:
    wake_with_parent()
print(os.getpid(), flush=True)
lock.acquire()
"""


@pytest.mark.parametrize("wakes", [True, False])
def test_a_main_thread_that_waits_for_a_lock_is_woken(wakes):
    """Without it the signal of another thread is not handled; with it it is."""
    start = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WAITS.replace('WAKES', str(wakes))!r}])"
    parent = f"{start}; sys.stdin.read()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", parent], stdin=pipe, stdout=pipe, text=True) as started:
        process = psutil.Process(int(started.stdout.readline()))
        started.kill()
    gone, _ = psutil.wait_procs([process], timeout=20 if wakes else 4)
    assert bool(gone) == wakes
    if not wakes:
        process.kill()


STARTS = """
import subprocess, sys
def start(*words):
    child = subprocess.Popen([sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    return child
names = sys.argv[3:]
children = {name: start(name, *sys.argv[1:3]) for name in names}
print(*[children[name].pid for name in ("flwr-clientapp", "other")], flush=True)
children["answers"].communicate(b"now")
print(children["answers"].returncode, flush=True)
sys.stdin.read()
"""
SLEEPS = "import time; print(1, flush=True); time.sleep(60)"
ANSWERS = """
import sys
from flwr_replay import processes
processes.LEFT, processes.IDLE = map(int, sys.argv[1:])
print(1, flush=True)
sys.stdin.read()
processes.end_those_left()
"""
EARLIER, LATER = ("flwr-clientapp", "other", "answers"), ("answers", "flwr-clientapp", "other")


@pytest.mark.parametrize(
    ("parent", "left", "idle", "order", "ended"),
    [
        ("flower-superexec", 0, 15, EARLIER, True),
        ("another", 0, 15, EARLIER, False),
        ("flower-superexec", 60, 15, EARLIER, False),  # it has just begun
        ("flower-superexec", 0, 0, EARLIER, False),  # it has worked
        ("flower-superexec", 0, 15, LATER, False),  # its message still comes
    ],
)
def test_clientapps_that_wait_beside_a_later_one_are_ended(tmp_path, parent, left, idle, order, ended):
    for name, script in ((parent, STARTS), ("flwr-clientapp", SLEEPS), ("other", SLEEPS), ("answers", ANSWERS)):
        (tmp_path / name).write_text(script)
    words = [sys.executable, parent, str(left), str(idle), *order]
    with subprocess.Popen(words, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as superexec:
        app, other = (psutil.Process(int(pid)) for pid in superexec.stdout.readline().split())
        assert superexec.stdout.readline() == b"0\n"
        if ended:
            until(lambda: app.status() == psutil.STATUS_ZOMBIE, 20, app.status)
        else:
            time.sleep(0.5)
        assert [process.status() == psutil.STATUS_ZOMBIE for process in (app, other)] == [ended, False]
        other.kill()
        app.kill()


@pytest.mark.parametrize("error", [psutil.AccessDenied(1), PermissionError(13, "hidden")])
def test_an_answer_does_not_fail_where_a_system_hides_processes(monkeypatch, error):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(processes, "_runs", lambda *_: True)
    monkeypatch.setattr(psutil.Process, "children", refuse)
    end_those_left()
    assert processes.left_clientapps(os.getpid(), time.time()) == []
