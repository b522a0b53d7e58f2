"""An institution's account: on the disk before a release, kept through crashes, stopped before it is exceeded."""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from math import inf

import pytest
from harness import forked

from flwr_replay.errors import PrivacyError, RunError
from flwr_replay.files.atomic import write_atomic
from flwr_replay.privacy.account import CHARGES, Account
from flwr_replay.privacy.accounting import SampledGaussian, epsilon

STEP = SampledGaussian(0.1, 1.0, 1)


def charge_of_steps(steps):
    return SampledGaussian(STEP.rate, STEP.sigma, steps)


def affordable(account, cost):
    """Return how many of these steps the budget still allows."""
    totals = (epsilon([*account.spent, replace(cost, steps=n)], account.delta) for n in range(1, cost.steps + 1))
    return sum(1 for _ in takewhile(lambda total: total <= account.limit, totals))


def test_charges_outlive_the_process_and_compose_over_mechanisms(tmp_path):
    Account(tmp_path, delta=1e-5).charge("generator", charge_of_steps(20))
    Account(tmp_path, delta=1e-5).charge("prior", SampledGaussian(0.2, 2.0, 5))
    Account(tmp_path, delta=1e-5).charge("generator", charge_of_steps(30))
    account = Account(tmp_path, delta=1e-5)
    assert account.epsilon() == epsilon([charge_of_steps(50), SampledGaussian(0.2, 2.0, 5)], 1e-5)
    assert Account(tmp_path / "another-run", delta=1e-5).epsilon() == 0


def test_it_stops_before_the_step_that_would_exceed_the_budget(tmp_path):
    account, taken = Account(tmp_path, delta=1e-5, limit=3.0), 0
    most = affordable(account, charge_of_steps(10_000))
    assert most < 10_000
    while affordable(account, STEP):
        account.charge("encoder", STEP)
        taken += 1
        assert affordable(account, charge_of_steps(10_000)) == most - taken
    with pytest.raises(PrivacyError, match=r"epsilon 3 at delta 1e-05; 1 steps of encoder .* 0 of them are left"):
        account.charge("encoder", STEP)
    assert epsilon([charge_of_steps(taken)], 1e-5) <= 3.0 < epsilon([charge_of_steps(taken + 1)], 1e-5)
    assert account.epsilon() == epsilon([charge_of_steps(taken)], 1e-5)  # what was refused is not charged


def test_an_account_keeps_the_accountant_of_its_charges(tmp_path):
    """Older charges name none: what was stated of them does not shrink, nor does a new version's budget grow."""
    Account(tmp_path / "new", delta=1e-5, accountant="prv").charge("proxy", charge_of_steps(300))
    assert Account(tmp_path / "new", delta=1e-5).epsilon() == epsilon([charge_of_steps(300)], 1e-5, "prv")
    Account(tmp_path / "old", delta=1e-5).charge("proxy", charge_of_steps(300))
    mixed = Account(
        tmp_path / "new", delta=1e-5, limit=epsilon([charge_of_steps(301)], 1e-5, "prv")
    )  # it would count by RDP
    with pytest.raises(PrivacyError, match="0 of them are left"):
        mixed.charge("proxy", STEP)
    charges = re.sub(r', "accountant": "rdp"|, "crc32": \d+', "", (tmp_path / "old" / CHARGES).read_text())
    (tmp_path / "old" / CHARGES).write_text(charges)
    resumed = Account(tmp_path / "old", delta=1e-5, limit=epsilon([charge_of_steps(310)], 1e-5), accountant="prv")
    resumed.charge("proxy", charge_of_steps(10))
    assert resumed.epsilon() == epsilon([charge_of_steps(310)], 1e-5)
    with pytest.raises(PrivacyError, match="0 of them are left"):
        resumed.charge("proxy", STEP)


def test_a_visit_is_charged_whole_or_not_at_all(tmp_path):
    account = Account(tmp_path, delta=1e-5, limit=3.0)
    most = affordable(account, charge_of_steps(10_000))
    with pytest.raises(PrivacyError, match=f"{most} of them are left"):
        account.charge("encoder", charge_of_steps(most + 1))
    assert account.spent == []
    account.charge("encoder", charge_of_steps(most))
    assert affordable(account, STEP) == 0


def test_a_charge_is_on_the_disk_before_it_returns_and_after_a_kill(tmp_path):
    """A process that is killed right after its charge, as in the middle of a visit, and the same visit again."""
    Account(tmp_path, delta=1e-5).charge("generator", charge_of_steps(10))

    def charge_and_die():
        Account(tmp_path, delta=1e-5).charge("generator", charge_of_steps(10))
        os.kill(os.getpid(), signal.SIGKILL)

    child = forked(charge_and_die)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert Account(tmp_path, delta=1e-5).spent == [charge_of_steps(10), charge_of_steps(10)]
    Account(tmp_path, delta=1e-5).charge("generator", charge_of_steps(10))
    assert (
        Account(tmp_path, delta=1e-5).epsilon()
        == epsilon([charge_of_steps(30)], 1e-5)
        > epsilon([charge_of_steps(20)], 1e-5)
    )


def test_file_and_folders_are_flushed(tmp_path, monkeypatch):
    folder, flushed, fsync = tmp_path / "run", [], os.fsync

    def watch(descriptor):
        flushed.append((os.readlink(f"/proc/self/fd/{descriptor}"), (folder / CHARGES).read_text().count("\n")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watch)
    Account(folder, delta=1e-5).charge("generator", charge_of_steps(10))
    assert flushed == [(str(folder / CHARGES), 1), (str(folder), 1), (str(tmp_path), 1)]
    Account(folder, delta=1e-5).charge("generator", charge_of_steps(10))
    assert flushed[3:] == [(str(folder / CHARGES), 2)]  # the folders' entries are there already
    write_atomic(folder / CHARGES, (folder / CHARGES).read_text())  # as what a crash tore is mended
    flushed.clear()
    Account(folder, delta=1e-5).charge("generator", charge_of_steps(10))
    assert [name for name, _ in flushed] == [str(folder / CHARGES), str(folder), str(tmp_path)]


def test_a_line_that_a_crash_tore_was_never_released(tmp_path):
    account = Account(tmp_path, delta=1e-5)
    account.charge("generator", charge_of_steps(10))
    with open(tmp_path / CHARGES, "a") as file:
        file.write('{"time": "2026-')
    assert account.spent == [charge_of_steps(10)]
    account.charge("generator", charge_of_steps(5))
    assert account.spent == [charge_of_steps(10), charge_of_steps(5)]


def test_a_charge_of_which_one_bit_flipped_is_reported(tmp_path):
    account = Account(tmp_path, delta=1e-5)
    account.charge("generator", charge_of_steps(20))
    whole = (tmp_path / CHARGES).read_bytes()
    flipped = 0
    for at in range(len(whole) - 1):
        write_atomic(tmp_path / CHARGES, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with suppress(RunError):
            assert account.epsilon() == epsilon([charge_of_steps(20)], 1e-5), whole[at - 9 : at + 9]
            continue
        flipped += 1
    assert flipped > len(whole) // 2
    write_atomic(tmp_path / CHARGES, re.sub(rb', "crc32": \d+', b"", whole))  # as older versions wrote it
    assert account.epsilon() == epsilon([charge_of_steps(20)], 1e-5)


def test_charges_at_the_same_time_do_not_exceed_the_budget_together(tmp_path):
    most = affordable(Account(tmp_path, delta=1e-5, limit=3.0), charge_of_steps(10_000))
    Account(tmp_path, delta=1e-5).charge("encoder", charge_of_steps(most - 5))

    def one(_):
        try:
            Account(tmp_path, delta=1e-5, limit=3.0).charge("encoder", STEP)
        except PrivacyError:
            return 0
        return 1

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(one, range(16))) == 5


def test_noise_that_the_seed_gives_protects_nothing(tmp_path):
    account = Account(tmp_path, delta=1e-5, limit=9.0)
    account.charge("generator", charge_of_steps(10))
    assert account.epsilon() < inf
    account.charge("generator", charge_of_steps(1), noise="seeded")
    assert account.epsilon() == inf
    with pytest.raises(PrivacyError, match="budget"):  # the budget works as it would with secret noise
        account.charge("generator", charge_of_steps(10_000), noise="seeded")


def test_without_locks_nothing_is_charged(tmp_path, monkeypatch):
    import fcntl

    def fails(*_):
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", fails)
    with pytest.raises(RunError, match="file system with locks"):
        Account(tmp_path, delta=1e-5).charge("generator", charge_of_steps(10))
    assert not (tmp_path / CHARGES).exists()


def test_what_others_write_is_read(tmp_path):
    """Another process's charge, and a backup that is put back, show in an account that is open here."""
    account = Account(tmp_path, delta=1e-5)
    account.charge("generator", charge_of_steps(1))
    backup = (tmp_path / CHARGES).read_text()
    (tmp_path / CHARGES).write_text(backup * 3)
    assert [cost.steps for cost in account.spent] == [1, 1, 1]
    account.charge("generator", charge_of_steps(2))
    assert [cost.steps for cost in account.spent] == [1, 1, 1, 2]
    write_atomic(tmp_path / CHARGES, backup)
    assert [cost.steps for cost in account.spent] == [1]
    (tmp_path / CHARGES).write_text("torn\n" + backup)
    for _ in range(2):  # one that cannot be read never counts as nothing
        with pytest.raises(RunError, match="must be JSON"):
            account.epsilon()
    (tmp_path / CHARGES).unlink()
    assert account.spent == []
