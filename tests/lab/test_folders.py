"""A folder that an attack is given is refused by the option that named it."""

import pytest

from flwr_replay.config.compose import compose
from flwr_replay.errors import DataError
from flwr_replay.lab.judge import load_for


@pytest.mark.parametrize("option", ["--aux", "--data"])
def test_a_wrong_folder_is_refused_by_its_option(option, tmp_path):
    task = compose(["task=folder", f"task.data_dir={tmp_path / 'nothing'}", "classes=2", "task.size=8"]).task
    with pytest.raises(DataError) as refused:
        load_for(option, task)
    assert str(refused.value).startswith(f"{option}={tmp_path / 'nothing'}: {option} must be a folder")
    assert "task.data-dir" not in str(refused.value)
