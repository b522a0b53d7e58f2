"""A ledger that only grows is divided into segments: every line stays, once, whoever writes and whoever is killed."""

import errno
import os
import shutil
import signal
from random import Random

import pytest
from harness import forked

from flwr_replay.errors import RunError
from flwr_replay.files import lines as module
from flwr_replay.files.lines import Lines, read_lines, segments

LONG = "x" * 30
MOST = 150  # bytes: three lines


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


def append_numbers(lines, *numbers):
    for number in numbers:
        lines.append([{"n": number, "text": LONG}])
        lines.flush(to_disk=True)


def numbers_kept(path):
    return [row["n"] for file in segments(path) for row in read_lines(file)]


def test_a_file_is_divided_and_all_lines_stay_in_order(path):
    lines = Lines(path, most=MOST)
    append_numbers(lines, *range(10))
    assert [file.name for file in segments(path)] == [*(f"ledger-{n:04d}.jsonl" for n in (1, 2, 3)), "ledger.jsonl"]
    assert numbers_kept(path) == list(range(10))
    assert all(file.stat().st_mode & 0o077 == 0 for file in segments(path))
    path.with_name("ledger-0001.jsonl").rename(path.with_name("archive"))  # its owner takes a segment away
    path.with_name("ledger-notes.jsonl").touch()  # and has a file of a similar name
    append_numbers(lines, *range(10, 13))
    assert [file.name for file in segments(path)] == [*(f"ledger-{n:04d}.jsonl" for n in (2, 3, 4)), "ledger.jsonl"]
    assert numbers_kept(path) == list(range(3, 13))


def test_of_two_processes_none_writes_to_a_closed_segment(path):
    first, second = Lines(path, most=MOST), Lines(path, most=100)
    append_numbers(first, *range(3))
    append_numbers(second, 3)  # divides
    append_numbers(first, 4)
    assert [len(read_lines(file)) for file in segments(path)] == [3, 2]


def rotated(path):
    path.rename(path.with_name("ledger.jsonl.1"))


def rotated_with_create(path):
    rotated(path)
    path.touch()


def rotated_by_date(path):
    path.rename(path.with_name("ledger.jsonl-20261128"))


def rotated_by_copy(path):
    shutil.copy(path, path.with_name("ledger.jsonl.1"))
    os.truncate(path, 0)


def replaced(path):
    path.unlink()
    path.with_name("other").touch()  # else it may get the same inode
    path.write_text('{"n": 7}\n')


def cut_last_bytes(path):
    os.truncate(path, path.stat().st_size - 10)


@pytest.mark.parametrize(
    "way", [rotated, rotated_with_create, rotated_by_date, rotated_by_copy, replaced, cut_last_bytes, os.unlink]
)
def test_a_file_that_another_program_takes_away_gets_no_line_and_none_begins_in_its_place(path, way):
    lines = Lines(path)
    append_numbers(lines, 1, 2)
    before = path.read_bytes()
    way(path)
    left = path.exists() and path.read_bytes()
    for _ in range(2):
        with pytest.raises(RunError, match=r"ledger\.jsonl must stay where it is"):
            append_numbers(lines, 3)
    assert (path.exists() and path.read_bytes()) == left
    lines.close()
    if old := [*path.parent.glob("ledger.jsonl?*")]:
        old[0].rename(path)
        assert path.read_bytes() == before
        append_numbers(Lines(path), 3)
        assert numbers_kept(path) == [1, 2, 3]


def test_who_opens_a_file_while_another_process_divides_it_writes_to_the_next_segment(path, monkeypatch):
    def closed_meanwhile(*words, **more):
        file = open(*words, **more)  # noqa: SIM115 - the caller closes it
        monkeypatch.undo()
        path.rename(path.with_name("ledger-0001.jsonl"))
        return file

    append_numbers(Lines(path, most=MOST), *range(3))
    monkeypatch.setattr(module, "open", closed_meanwhile, raising=False)
    append_numbers(Lines(path, most=MOST), 3)
    assert [len(read_lines(file)) for file in segments(path)] == [3, 1]


def test_without_locks_nothing_is_divided(path, monkeypatch):
    """Two processes could give two segments one name."""
    monkeypatch.setattr(module, "lock", lambda file, wait: False)
    append_numbers(Lines(path, most=MOST), *range(10))
    assert segments(path) == [path]
    assert numbers_kept(path) == list(range(10))


def test_a_file_that_cannot_be_divided_gets_no_line(path, monkeypatch):
    def refused(*names):
        raise PermissionError(errno.EACCES, "Permission denied")

    lines = Lines(path, most=MOST)
    append_numbers(lines, *range(3))
    monkeypatch.setattr(module.os, "rename", refused)
    with pytest.raises(RunError, match="Permission denied: give this user the right to it"):
        append_numbers(lines, 3)
    monkeypatch.undo()
    append_numbers(lines, 4)
    assert numbers_kept(path) == [0, 1, 2, 4]


def say_what_is_written(path, first, writing):
    lines = Lines(path, most=MOST)
    for number in range(first, first + 10_000):
        append_numbers(lines, number)
        os.write(writing, f"{number} ".encode())


def test_a_kill_at_any_moment_loses_no_line_that_was_written(path):
    """Two processes write and divide; each says a number once its line is on the disk."""
    rng, promised, first = Random(0), [], 0
    for _ in range(6):
        ends, children = [], []
        for _ in range(2):
            reading, writing = os.pipe()
            children.append(forked(say_what_is_written, path, first, writing))
            os.close(writing)
            ends.append(reading)
            first += 10_000
        heard = [b"", b""]
        for k, reading in enumerate(ends):
            for _ in range(rng.randrange(100)):
                heard[k] += os.read(reading, 1)
        for child in children:
            os.kill(child, signal.SIGKILL)
            assert os.waitpid(child, 0)[1] == signal.SIGKILL
        for reading, begun in zip(ends, heard, strict=True):
            with open(reading, "rb") as numbers:
                promised += [int(number) for number in (begun + numbers.read()).split(b" ")[:-1]]
    Lines(path).close()  # removes an incomplete last line
    lines_kept = numbers_kept(path)
    assert len(lines_kept) == len(set(lines_kept))
    assert set(promised) <= set(lines_kept)
    assert len(lines_kept) <= len(promised) + 12  # written, and killed before that was said
    assert len(segments(path)) > 5
    assert all(file.read_bytes().endswith(b"\n") for file in segments(path) if file.stat().st_size)


def test_a_next_segment_that_cannot_be_opened_is_one_line_and_is_opened_later(path, monkeypatch):
    lines = Lines(path, most=1)

    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    append_numbers(lines, 0)
    with monkeypatch.context() as patch:
        patch.setattr(module, "opener", full)
        for _ in range(2):
            with pytest.raises(RunError, match="make room on its disk"):
                append_numbers(lines, 1)
    append_numbers(lines, 2)
    assert numbers_kept(path) == [0, 2]
