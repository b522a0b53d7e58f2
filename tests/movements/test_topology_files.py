"""A user's own mixing matrices: read from a file, or refused in one line."""

import json
from pathlib import Path

import numpy as np
import pytest

from flwr_replay.errors import ConfigError
from flwr_replay.movements.topology import mixing_matrix, read_matrices

THREE = [[0.5, 0.25, 0.0], [0.5, 0.5, 1.0], [0.0, 0.25, 0.0]]
OTHER = [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]


def written(folder, name, values):
    path = folder / name
    if path.suffix == ".npy":
        np.save(path, np.array(values))
    elif path.suffix == ".json":
        path.write_text(json.dumps(values))
    else:
        width = np.shape(values)[-1]
        rows = np.reshape(values, (-1, width)).tolist()
        path.write_text("\n".join(",".join(map(str, row)) for row in rows) + "\n")
    return path


@pytest.mark.parametrize("name", ["p.npy", "p.json", "p.csv", "P.CSV"])
def test_a_file_holds_one_matrix_or_several_that_take_turns(tmp_path, name):
    matrix = read_matrices(written(tmp_path, name, THREE), 3)
    assert matrix.tolist() == [THREE]
    two = read_matrices(written(tmp_path, name, [THREE, OTHER]), 3)
    assert two.tolist() == [THREE, OTHER]
    drawn = [mixing_matrix("file", 3, t, matrices=two).tolist() for t in range(5)]
    assert drawn == [THREE, OTHER, THREE, OTHER, THREE]
    assert [mixing_matrix("file", 3, t, matrices=matrix).tolist() for t in range(2)] == [THREE, THREE]
    mixing_matrix("file", 3, 0, matrices=two)[:] = 9
    assert two.tolist() == [THREE, OTHER]


def test_a_file_for_one_institution_exchanges_nothing_either(tmp_path):
    matrices = read_matrices(written(tmp_path, "p.json", [[1 - 5e-10]]), 1)
    assert mixing_matrix("file", 1, 3, matrices=matrices).tolist() == [[1.0]]


def test_rounding_in_the_file_does_not_add_up(tmp_path):
    third = float(f"{1 / 3:.10f}")
    p = read_matrices(written(tmp_path, "p.csv", [[third] * 3] * 3), 3)[0]
    assert abs(np.linalg.matrix_power(p, 10**6).sum() - 3) < 1e-9
    with pytest.raises(ConfigError, match=r"column 1 \(from 1\) sums to 0\.99999999[0-9]*:"):
        read_matrices(written(tmp_path, "p.csv", [[1 / 3 - 1e-9] * 3] * 3), 3)


def with_entry(row, column, value):
    changed = [list(line) for line in THREE]
    changed[row][column] = value
    return changed


EXAMPLES = [
    ("p.npy", THREE[:2], r"one square matrix .* got shape \(2, 3\): one row and one column for each institution"),
    ("p.csv", THREE[:2], r"one square matrix .* got shape \(2, 3\)"),
    ("p.npy", THREE[0], r"one square matrix .* got shape \(3,\)"),
    ("p.npy", 1.0, r"one square matrix .* got shape \(\)"),
    ("p.npy", np.zeros((0, 3, 3)), r"one square matrix .* got shape \(0, 3, 3\)"),
    ("p.json", [], r"one square matrix .* got shape \(0,\)"),
    ("p.npy", [[THREE]], r"one square matrix .* got shape \(1, 1, 3, 3\)"),
    ("p.npy", np.eye(4), r"got 4 x 4 for 3 institutions: give a matrix of that size, or choose a topology by name"),
    ("p.json", [np.eye(2).tolist()] * 3, r"got 2 x 2 for 3 institutions"),
    ("p.npy", with_entry(0, 2, -0.5), r"not negative; row 1, column 3 \(from 1\) is -0\.5: mend it"),
    ("p.csv", with_entry(2, 1, "nan"), r"must be finite .*; row 3, column 2 \(from 1\) is nan"),
    ("p.json", [OTHER, with_entry(1, 0, float("inf"))], r"matrix 2, row 2, column 1 \(from 1\) is inf"),
    ("p.csv", [OTHER, with_entry(1, 0, "-inf")], r"matrix 2, row 2, column 1 \(from 1\) is -inf"),
    ("p.npy", np.transpose(THREE), r"must sum to one, .* column 1 \(from 1\) sums to 0\.75: .* transpose the matrix"),
    (
        "p.json",
        with_entry(2, 1, 0.25 + 2e-9),
        r" column 2 \(from 1\) sums to 1\.000000002: column k holds what k keeps",
    ),
    ("p.npy", [OTHER, with_entry(0, 2, 1.0)], r"matrix 2, column 3 \(from 1\) sums to 2:"),
    ("p.npy", [[1, 1, 1], [0, 0, 0], [0, 0, 0]], r"row 2 \(from 1\) is all zeros: let it keep a share or receive one"),
    ("p.npy", np.eye(3) * 1j, r"p\.npy must hold a matrix of numbers; it cannot be read: .*complex"),
    ("p.json", {"p": THREE}, r"p\.json must hold a matrix of numbers"),
    ("p.json", [["1.0"]], r"p\.json must hold a matrix of numbers"),
    ("p.json", [[1.0], [0.0, 1.0]], r"p\.json must hold a matrix of numbers"),
    ("p.csv", with_entry(1, 1, "0_5"), r"p\.csv must hold a matrix of numbers; .* digits 0 to 9"),
    ("p.csv", with_entry(1, 1, "half"), r"p\.csv must hold a matrix of numbers; .* could not convert .* 'half'"),
]


@pytest.mark.parametrize(("name", "values", "line"), EXAMPLES)
def test_a_bad_matrix_is_refused_in_one_line(tmp_path, name, values, line):
    path = written(tmp_path, name, values)
    with pytest.raises(ConfigError, match=line) as refusal:
        read_matrices(path, 3)
    assert "\n" not in str(refusal.value)
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.npy", b""),
        ("p.npy", b"PK\x03\x04 no array"),
        ("p.npy", b"\x93NUMPY\x01\x00\x46\x00{'descr'"),
        ("p.json", b"[[1, 0], [0,"),
        ("p.json", b"\xff\xfe"),
        ("p.csv", b"0;1\n1;0\n"),
        ("p.csv", b"0,1\n1\n"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"must hold a matrix of numbers; it cannot be read: \S") as refusal:
        read_matrices(path, 2)
    assert "\n" not in str(refusal.value)


def test_objects_in_a_file_are_never_unpickled(tmp_path):
    np.save(tmp_path / "p.npy", np.array([[Path("x")]], dtype=object), allow_pickle=True)
    with pytest.raises(ConfigError, match=r"it cannot be read: .*[Oo]bject arrays cannot be loaded"):
        read_matrices(tmp_path / "p.npy", 1)


def test_a_file_that_is_missing_or_of_another_kind_is_refused(tmp_path):
    for name in ("p.npy", "p.json", "p.csv"):
        with pytest.raises(ConfigError, match=rf"must be a file of mixing matrices; .*{name} does not exist"):
            read_matrices(tmp_path / name, 2)
    with pytest.raises(ConfigError, match=r"must be \.npy, \.json or \.csv; got .*p\.txt: save it as one of these"):
        read_matrices(tmp_path / "p.txt", 2)
    (tmp_path / "folder.npy").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be read: .*directory"):
        read_matrices(tmp_path / "folder.npy", 2)


def test_names_and_files_that_do_not_go_together_are_refused():
    with pytest.raises(
        ConfigError, match=r"strategy\.topology must be one of .*'exponentail': did you mean exponential"
    ):
        mixing_matrix("exponentail", 3, 0)
    with pytest.raises(ConfigError, match="got topology=file without a file"):
        mixing_matrix("file", 3, 0)
    with pytest.raises(ConfigError, match="got topology=ring with a file"):
        mixing_matrix("ring", 3, 0, matrices=np.array([THREE]))
    with pytest.raises(ConfigError, match=r"topology-file must have .* got 3 x 3 for 2 institutions: .* by name"):
        mixing_matrix("file", 2, 0, matrices=np.array([THREE]))
