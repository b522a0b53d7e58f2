"""YAML that a person writes: nothing in it has two meanings."""

import pytest
import yaml

from flwr_replay.config.catalogue import conf_dir
from flwr_replay.config.strict_yaml import read_yaml
from flwr_replay.errors import ConfigError


@pytest.fixture
def read(tmp_path):
    def written(text):
        (tmp_path / "a.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_yaml(tmp_path / "a.yaml", "the file")

    return written


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("a: [model]\nb: 1\na: [model, rows]", 3, "the key 'a' stands in line 1 already"),
        ("a: 1\n'a': 2", 2, "stands in line 1 already"),
        ("a: 1\n? a\n: 2", 2, "stands in line 1 already"),
        *((f"b: 1\na: none{end}c: 2", 2, "ends a line for some readers only") for end in "\x85\u2028\u2029"),
        ("'a\u2028b': 1", 1, r"U\+2028 ends a line"),
        *(
            (f"a: {text}", 1, f"{text} is too large or too small")
            for text in ("1e-400", "-0.1e-999", "1e400", "-2E309")
        ),
        ("b:\n  c: {d: 1, d: 2}", 2, "the key 'd' stands in line 2 already"),
        ("b: [{d: 1, d: 2}]", 1, "the key 'd' stands in line 1 already"),
        ("a: &x [model]\nb: *x", 1, "anchors"),
        ("b: 1\na: *x", 2, "anchors"),
        ("a: !!float 1", 1, "tags"),
        ("a: !python/object:os.system {}", 1, "tags"),
        ("a: 1\n---\na: 2", 2, "expected a single document"),
        ("? [a]\n: 1", 1, "a key must be a name"),
        *((f"b: 1\na: {text}", 2, f"{text} is read in more than one way") for text in ("1:30", "010", "08", "-012")),
        *((f"a: {text}", 1, f"{text} is read in more than one way") for text in ("0x10", "0o10", "0b1", "1_000")),
        *((f"a: {text}", 1, f"{text} is read in more than one way") for text in (".inf", "-.Inf", ".nan", "190:20:30")),
        *(
            (f"a: {text}", 1, f"{text} is read in more than one way")
            for text in ("yes", "No", "on", "OFF", "2026-01-02")
        ),
        ("a: 1\n\tb: 2", 2, "'\\\\t' that cannot start any token"),
        ("a: [1\nb: 2", 2, "flow sequence"),
    ],
)
def test_what_two_readers_take_for_two_things_is_refused_with_its_line(read, text, line, says):
    with pytest.raises(ConfigError, match=rf"the file must be readable YAML; got .*a\.yaml, line {line}: .*{says}"):
        read(text)


@pytest.mark.parametrize(
    "text", [b"a: \xff", "a: 1".encode("utf-16"), b"a: 1\0", b"a: " + b"9" * 5000, b"a: [" * 3000, b"- a", b"3"]
)
def test_whatever_else_is_no_mapping_is_one_line(read, text):
    with pytest.raises(ConfigError, match="the file must") as refused:
        read(text)
    assert "\n" not in str(refused.value)


def test_the_values_are_those_of_yaml_1_2(read):
    values = read(
        "\ufeffa: 1e-5\r\nb: [-3, +4, .5, 1., 1.5E3, 0, 0.0e-999]\r\n"
        "c: [true, False, null, ~, '010', \"yes\", no one]\r\nd:\r\n"
    )
    assert values == {
        "a": 1e-5,
        "b": [-3, 4, 0.5, 1.0, 1500.0, 0, 0.0],
        "c": [True, False, None, None, "010", "yes", "no one"],
        "d": None,
    }
    assert values.lines == {"a": 1, "b": 2, "c": 3, "d": 4}
    assert [type(value) for value in values["b"]] == [int, int, float, float, float, int, float]


def test_our_own_files_mean_the_same_to_both_readers():
    files = sorted(conf_dir().rglob("*.yaml"))
    assert len(files) > 50
    for file in files:
        assert read_yaml(file, "a file of options") == (yaml.safe_load(file.read_text()) or {}), file
