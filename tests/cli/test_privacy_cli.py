"""flwr-replay privacy: what it prints, and one line for every mistake."""

import json
import subprocess
import sys

import pytest

from flwr_replay.cli.main import main
from flwr_replay.config.privacy import PrivacyConfig
from flwr_replay.errors import ConfigError
from flwr_replay.privacy.accounting import SampledGaussian, epsilon

FIG7 = ["--examples", "1144", "--batch", "32", "--epochs", "225", "--delta", "8.7e-4"]


@pytest.fixture
def privacy(monkeypatch, capsys, tmp_path):
    """Run a command in this process, in an empty folder; return exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["flwr-replay", "privacy", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code, *capsys.readouterr()

    return call


def test_epsilon_is_reported_by_both_accountants_with_its_steps(privacy):
    code, out, _ = privacy("epsilon", *FIG7, "--noise", "0.7")
    assert code == 0
    assert "epsilon 39.07 (RDP), 35.95 (PRV) at delta 0.00087, noise 0.7" in out
    assert "225 epochs of 35 steps make 7,875; sampling rate 32/1,144" in out
    assert "shuffled epochs are not covered" in out


def test_epsilon_as_json_with_the_default_delta(privacy):
    report = json.loads(privacy("epsilon", *FIG7[:6], "--noise", "2", "--json")[1])
    cost = SampledGaussian(32 / 1144, 2.0, 7875)
    assert report["epsilon"] == {name: epsilon([cost], 1 / 1144, name) for name in ("rdp", "prv")}
    assert report["delta"] == 1 / 1144
    assert (report["steps"], report["rate"]) == (7875, 32 / 1144)


def test_where_every_step_takes_all_examples_epsilon_is_exact(privacy):
    whole = ["--examples", "100", "--batch", "100", "--epochs", "30", "--delta", "1e-5"]
    assert "(exact) at delta 1e-05, noise " in privacy("noise", "--epsilon", "8", *whole)[1]
    assert "epsilon 7.996 (exact) at delta 1e-05, noise 3.289" in privacy("epsilon", *whole, "--noise", "3.289")[1]


def test_where_prv_cannot_reach_rdp_stands_alone(privacy):
    code, out, _ = privacy("epsilon", *FIG7, "--noise", "0.2")
    assert code == 0
    assert float(out.split()[1]) > 2000
    assert "(RDP) at delta" in out


def test_the_noise_that_is_printed_keeps_the_epsilon(privacy):
    report = json.loads(privacy("noise", "--epsilon", "8", *FIG7, "--json")[1])
    assert 7.99 < report["epsilon"]["rdp"] <= 8
    assert f"noise {report['noise']:g}\n" in privacy("noise", "--epsilon", "8", *FIG7)[1]


@pytest.mark.sampled(2, of="slow audits")
def test_figure_7_is_drawn_with_the_papers_points_beside_ours(privacy, tmp_path):
    code, out, _ = privacy("plot", "--examples", "1144,4575", "--out", "pictures/fig7.png")
    assert code == 0
    assert "|D| = 4,575, delta 0.00022: epsilon 21.0 after 300 epochs (RDP)" in out
    assert "after 225 epochs (7,875 steps) the paper reports 17.8; we find 39.1 (RDP) and 35.9 (PRV)" in out
    assert (tmp_path / "pictures" / "fig7.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "pictures" / "fig7.csv").read_text().splitlines()) == 1 + 2 * 300
    assert "paper" not in privacy("plot", "--examples", "1144", "--noise", "1", "--epochs", "9")[1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["epsilon", "--examples", "9", "--batch", "32", "--noise", "1", "--epochs", "1"], "a batch of 32"),
        (["epsilon", *FIG7, "--noise", "0"], "--noise"),
        (["epsilon", *FIG7[:6], "--noise", "1", "--delta", "2"], "delta"),
        (["epsilon", "--examples", "0", "--batch", "1", "--noise", "1", "--epochs", "1"], "--examples"),
        (["epsilon", "--examples", "9"], "Missing option"),
        (["noise", "--epsilon", "-1", *FIG7], "target epsilon"),
        (["noise", "--epsilon", "8", *FIG7, "--accountant", "gdp"], "rdp, prv"),
        (["plot", "--examples", "1144,many"], "'1144,many'"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line_and_exit_code_2(privacy, words, says):
    code, _, err = privacy(*words)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2, err
    assert len(errors) == 1
    assert says in errors[0]


def test_help_imports_nothing_heavy():
    script = (
        "import sys; sys.argv = ['flwr-replay', 'privacy', '--help']\n"
        "from flwr_replay.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: print({'torch', 'numpy', 'opacus', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")
    assert "epsilon" in done.stdout


def test_the_configuration_gives_limit_delta_and_noise():
    paper = PrivacyConfig()
    assert (paper.sigma, paper.limit, paper.delta_for(1144)) == (0.7, float("inf"), 1 / 1144)
    assert PrivacyConfig(target_epsilon=8, delta=1e-5).limit == 8


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"noise": "none"}, r"privacy\.noise must be one of secret, shared, seeded"),
        ({"sigma": -1}, r"privacy\.sigma"),
        ({"clip": 0}, r"privacy\.clip"),
        ({"epsilon": float("nan")}, r"privacy\.epsilon"),
        ({"delta": 1}, r"privacy\.delta"),
        ({"sigma": 0}, r"privacy\.sigma lies in"),
        ({"epsilon": 8, "target_epsilon": 8}, "leave one of them out"),
    ],
)
def test_a_wrong_configuration_is_refused(wrong, says):
    with pytest.raises(ConfigError, match=says):
        PrivacyConfig(**wrong)
