"""docs/data.md tells of every data set, and its commands are ones that the program understands."""

import re
import shlex
from pathlib import Path

import pytest

from flwr_replay.config.catalogue import choices
from flwr_replay.config.compose import compose

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^flwr-replay run .*", PAGE, re.M)


def test_every_task_has_a_command():
    assert {re.search(r"task=(\w+)", command)[1] for command in COMMANDS} == set(choices("task")) - {
        "own"
    }  # docs/extend.md


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_compose(command):
    config = compose(shlex.split(command)[2:])
    assert f"task={config.task.name}" in command
    assert config.task.data_dir or config.task.name in ("digits", "diabetes")


def test_sections_of_the_table_exist():
    headings = {
        re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", PAGE, re.M)
    }
    assert set(re.findall(r"\]\(#([\w-]+)\)", PAGE)) <= headings
