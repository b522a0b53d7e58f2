"""The model of a finished run: loaded, used on images, exported."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from exported_runs import TINY, run_at
from harness import Stopping, command
from PIL import Image

from flwr_replay import load_model
from flwr_replay.cli.main import app
from flwr_replay.config.compose import compose
from flwr_replay.data.dealt import dealt, loaded
from flwr_replay.engines.simulate import run_inline
from flwr_replay.errors import ConfigError, DataError, RunError
from flwr_replay.files.tensors import digest, read_tensors
from flwr_replay.finished import predict
from flwr_replay.finished.export import card, export
from flwr_replay.finished.predict import images_in, predictions
from flwr_replay.finished.trained import TrainedModel
from flwr_replay.models.zoo import build
from flwr_replay.report.progress import Display
from flwr_replay.report.summary import summary
from flwr_replay.runs.listing import clean
from flwr_replay.runs.options import resolve


def shards_of(folder):
    """Return each institution's test examples."""
    _, config = resolve([], ".", str(folder))
    dealing = dealt(config.task, config.partition, config.nodes, config.seed)
    return {name: dealing.examples(loaded(config.task), k).test for k, name in enumerate(dealing.names)}


@pytest.fixture
def images(tmp_path, ran):
    """Write an institution's test images as files; return the folder and the labels."""
    examples = shards_of(ran[1])["institution-1"]
    (tmp_path / "deep").mkdir()
    for n, x in enumerate(examples.x):
        Image.fromarray(np.asarray(x)[0]).save(tmp_path / "deep" / f"{n:03d}.png")
    return tmp_path, examples.labels


def test_it_predicts_as_well_as_the_run_says(ran, images, monkeypatch):
    (folder, labels), (result, place) = images, ran
    monkeypatch.setattr(predict, "at_once", lambda *_: 16)  # else these few images are one block
    model = load_model(place)
    rows = list(csv.DictReader(io.StringIO(predictions(model, images_in(folder), folder))))
    right = [row["predicted"] == model.classes[label] for row, label in zip(rows, labels, strict=True)]
    assert np.mean(right) == pytest.approx(result["final"]["institutions"]["institution-1"]["accuracy"])
    assert [row["image"] for row in rows[:2]] == ["deep/000.png", "deep/001.png"]
    shares = np.array([[float(row[f"p({name})"]) for name in model.classes] for row in rows])
    assert shares.sum(1) == pytest.approx(np.ones(len(rows)), abs=1e-4)


def test_the_command_takes_a_list_and_writes_a_file(ran, images, capsys):
    folder, _ = images
    (folder / "list.csv").write_text("image\ndeep/001.png\ndeep/000.png\n")
    app(["predict", str(ran[1]), str(folder / "list.csv"), "--out", str(folder / "out.csv")], standalone_mode=False)
    assert "2 predictions" in capsys.readouterr().out
    app(["predict", str(ran[1]), str(folder / "deep" / "001.png")], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert (folder / "out.csv").read_text().splitlines()[1] == f"deep/{lines[1]}"


def test_a_list_with_labels_says_which_are_right(ran, images, capsys):
    folder, labels = images
    model = load_model(ran[1])
    lines = [f"deep/{n:03d}.png,{model.classes[label]}" for n, label in enumerate(labels)]
    (folder / "list.csv").write_text("\n".join(["image,label", *lines]))
    rows = list(csv.DictReader(io.StringIO(predictions(model, images_in(folder / "list.csv"), folder))))
    assert all((row["label"] == row["predicted"]) == (row["right"] == "1") for row in rows)
    assert np.mean([int(row["right"]) for row in rows]) == pytest.approx(
        ran[0]["final"]["institutions"]["institution-1"]["accuracy"]
    )
    (folder / "names.csv").write_text(f"image,label\ndeep/000.png,{rows[0]['predicted']}\n")
    [row] = csv.DictReader(io.StringIO(predictions(model, images_in(folder / "names.csv"), folder)))
    assert row["right"] == "1"
    app(["predict", str(ran[1]), str(folder / "names.csv"), "--out", str(folder / "out.csv")], standalone_mode=False)
    assert "1 predictions, 1 of 1 right: " in capsys.readouterr().out
    (folder / "some.csv").write_text(f"image,label\ndeep/000.png,{rows[0]['predicted']}\ndeep/001.png,\n")
    app(["predict", str(ran[1]), str(folder / "some.csv"), "--out", str(folder / "out.csv")], standalone_mode=False)
    assert "2 predictions, 1 of 1 right, 1 without a label: " in capsys.readouterr().out
    assert [row["right"] for row in csv.DictReader((folder / "out.csv").open())] == ["1", ""]


@pytest.mark.parametrize(
    ("names", "label", "right"),
    [
        ("1,2,3,4,5,6,7,8,9,10", "{position}", "0"),  # the next class is called so
        ("1,2,3,4,5,6,7,8,9,10", "0{name}.0", "1"),
        ("", " {position}.0", "1"),
        ("", "ill", "labels of task=digits must lie in 0..9; got 'ill'"),
        ("1,2,3,4,5,6,7,8,9,10", "11", "unknown class '11'"),
        ("z,o,t,h,f,i,s,v,e,n", "{position}", "unknown class"),
    ],
)
def test_a_label_is_right_if_it_is_the_predicted_class_and_not_by_its_text(ran, images, names, label, right):
    folder, model = images[0], load_model(ran[1])
    model = TrainedModel(model.network, replace(model.task, class_names=tuple(filter(None, names.split(",")))))
    image = folder / "deep" / "000.png"
    name = next(csv.DictReader(io.StringIO(predictions(model, images_in(image), folder))))["predicted"]
    position = model.classes.index(name)
    if position == 0 and right == "0":
        label = "2"
    (folder / "list.csv").write_text(f"image,label\ndeep/000.png,{label.format(name=name, position=position)}\n")
    if len(right) > 1:
        with pytest.raises(DataError, match=right):
            predictions(model, images_in(folder / "list.csv"), folder)
        return
    [row] = csv.DictReader(io.StringIO(predictions(model, images_in(folder / "list.csv"), folder)))
    assert (row["right"], row["label"] == row["predicted"]) == (right, right == "1")


def test_no_name_in_the_table_is_a_formula_and_all_are_read_back(ran, images):
    folder, model = images[0], load_model(ran[1])
    names = ("=1+1", "+a", "-b", "@c", "-1", "'=d", "\uff1de", "'tis", "f", "g")
    model = TrainedModel(model.network, replace(model.task, class_names=names))
    bad = folder / "=HYPERLINK(1)"
    bad.mkdir()
    for n, name in enumerate(names):
        (folder / "deep" / f"{n:03d}.png").rename(bad / f"{name}.png")
    rows = images_in(bad)
    text = predictions(model, [replace(row, label=row.file.stem) for row in rows], bad)
    cells = [cell for line in csv.reader(io.StringIO(text)) for cell in line]
    assert {cell for cell in cells if cell[0] in "=+-@\uff1d"} == {"-1"}  # a number stays one
    (bad / "again.csv").write_text(text, encoding="utf-8")
    again = images_in(bad / "again.csv")
    assert [(row.file, row.label) for row in again] == [(row.file, row.file.stem) for row in rows]
    assert predictions(model, again, bad) == text


@pytest.mark.parametrize("task", ["mine:load", "retina"])
def test_files_are_refused_that_nobody_has_prepared_as_the_training_images_were(task, tmp_path):
    given = compose([f"task={task}", "model=mlp"])
    model = TrainedModel(build(given.model, given.task, 0), given.task)
    with pytest.raises(
        ConfigError, match=f"task={task} learns from .* image files are not so prepared: give its images to"
    ):
        predictions(model, [], tmp_path)


def test_bad_images_are_left_out_and_listed_or_all_are_refused(ran, images, monkeypatch, capsys):
    folder, labels = images
    bad = {"000.png": b"no image", "001.png": (folder / "deep" / "001.png").read_bytes()[:60], "\x1b[2J.png": b""}
    words = ["predict", str(ran[1]), str(folder)]
    command(monkeypatch, *words)
    whole = capsys.readouterr().out.splitlines()
    for name, data in bad.items():
        (folder / "deep" / name).write_bytes(data)
    assert command(monkeypatch, *words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"2 more of {len(labels) + 1} images cannot be used; --skip-bad leaves such images out" in captured.err
    assert command(monkeypatch, *words, "--skip-bad") == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [whole[0], *whole[3:]]  # the header, and all but the first two
    listed = [line for line in captured.err.splitlines() if line.startswith("left out: ")]
    assert [name in line for name, line in zip(("\\x1b[2J", "000.png", "001.png"), listed, strict=True)] == [True] * 3
    assert f"3 of {len(labels) + 1} images are left out" in captured.err
    (folder / "list.csv").write_text("image,label\ndeep/000.png,z\ndeep/002.png,z\ndeep/002.png,\n")
    out = folder / "out.csv"
    assert command(monkeypatch, *words[:2], str(folder / "list.csv"), "--skip-bad", "--out", str(out)) == 0
    assert "2 predictions, " in capsys.readouterr().out
    assert [row["label"] for row in csv.DictReader(out.open())] == ["z", ""]  # labels stay with their images
    assert command(monkeypatch, *words[:2], str(folder / "deep" / "000.png"), "--skip-bad") == 2
    assert "cannot be read" in capsys.readouterr().err


def test_images_of_another_form_and_empty_folders_are_refused_whole(ran, images, tmp_path):
    folder, _ = images
    Image.new("L", (9, 8)).save(folder / "deep" / "zzz.png")
    with pytest.raises(DataError, match=r"zzz.png is 8 x 9 pixels"):
        app(["predict", str(ran[1]), str(folder), "--out", str(folder / "out.csv")], standalone_mode=False)
    assert not (folder / "out.csv").exists()
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="must hold images"):
        images_in(tmp_path / "none")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("job", ["local", "fedbn", "ditto", "proxyfl", "proxyfl, pool", "fml, pool"])
def test_private_models_are_used_at_their_institution(job, tmp_path, monkeypatch):
    strategy, _, pool = job.partition(", ")
    pairs = ["private_models=[cnn,mlp]", "dp=none", "lr=0.3"]
    options = pairs if strategy in ("proxyfl", "fml") else ["model=cnn"]
    options = [*options, *(["listen=pool", "alpha=0", "private_epochs=2"] if pool else [])]
    result, folder = run_at(tmp_path, monkeypatch, "task=digits", f"strategy={strategy}", *options)
    with pytest.raises(RunError, match="give --institution"):  # FML's averaged proxy is not what predicts
        load_model(folder)
    with pytest.raises(RunError, match="has no best model"):  # FedBN's server has a batch norm that nobody trained
        load_model(folder, best=True)
    states = tmp_path / "home" / "state" / "simulation"
    for name, examples in shards_of(folder).items():
        for model in (load_model(folder, name), load_model(states / name)):
            guesses = model(torch.as_tensor(examples.x)).argmax(1).numpy()
            told = result["final"]["institutions"][name]["accuracy"]
            assert np.mean(guesses == examples.labels) == pytest.approx(told)
    if strategy == "ditto":  # the shared model was tested beside their own
        told = f"test examples: accuracy {result['final']['global']['global-accuracy']:.4f}, "
        assert told in card(folder, load_model(folder, "global"), "global")
    if strategy == "proxyfl":
        assert "It should not be passed on." in card(folder, load_model(folder, "institution-1"), "institution-1")
    with pytest.raises(RunError, match=r"no model of 'institution-9'.*did you mean institution-"):
        load_model(folder, "institution-9")
    with pytest.raises(RunError, match="--run must be a run of"):
        load_model(states / "institution-1", run="another")


def test_a_regression_has_the_labels_unit(tmp_path, monkeypatch):
    result, folder = run_at(tmp_path, monkeypatch, "task=diabetes", "strategy=cwt")
    model, errors = load_model(folder), []
    for examples in shards_of(folder).values():
        outputs = model(torch.as_tensor(examples.x)).detach().numpy()
        errors.append(np.abs(outputs - examples.labels))
    assert np.concatenate(errors).mean() == pytest.approx(result["final"]["global"]["mae"], rel=1e-5)
    with pytest.raises(ConfigError, match="predictions are for images"):
        predictions(model, [], folder)
    text, mae = card(folder, model, ""), result["final"]["global"]["mae"]
    assert f"mae {mae:.4f} points, rmse" in text
    assert "Output: (B,), numbers in points." in text
    assert "Input: float (B, 10, 1, 1), made as task=diabetes made them" in text
    assert "probabilities" not in text
    model(torch.full((2, 10, 1, 1), 255.0))  # a table has any numbers


def outputs(file, form, x, classes):
    """Return what an exported file makes of x; an ONNX file says its classes, too."""
    if form == "torch":
        return torch.export.load(file).module()(x)
    import onnxruntime

    session = onnxruntime.InferenceSession(file)
    assert [place.shape[0] for place in (*session.get_inputs(), *session.get_outputs())] == ["batch"] * 2
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == [*classes]
    return torch.from_numpy(session.run(["output"], {"input": x.numpy()})[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["torch", "onnx"])
def test_an_exported_model_has_the_same_outputs(form, ran, tmp_path, capsys):
    app(["export", str(ran[1]), "--format", form, "--out", str(tmp_path / "mine")], standalone_mode=False)
    file, beside = map(str, capsys.readouterr().out.split())
    model = load_model(ran[1])
    for number in (1, 5):
        x = torch.rand(number, 1, 8, 8)
        torch.testing.assert_close(outputs(file, form, x, model.classes), model(x), rtol=0, atol=1e-5)
    assert str(Path(predict.__file__).parent).encode() not in Path(file).read_bytes()
    text = (tmp_path / "mine.md").read_text()
    assert beside == str(tmp_path / "mine.md")
    assert ran[0]["privacy-claim"] in text
    assert f"accuracy {ran[0]['final']['global']['accuracy']:.4f}" in text
    assert "z, o, t" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([file.rpartition("/")[2], "mine.md"])


def best_of(folder):
    [file] = (folder / "best").iterdir()
    return file


@pytest.mark.sampled(2, of="slow runs")
def test_the_best_round_is_kept_as_it_was_tested_also_over_a_resumption(tmp_path, monkeypatch, capsys):
    options = ["task=digits", "strategy=cwt", "rounds=5", "seed=1", "partition=ks", "partition.ks=0.9", "lr=0.1"]
    options += ["split=test"]
    result, folder = run_at(tmp_path, monkeypatch, *options, "run_name=whole")
    best = result["best"]["round"]
    assert best < result["rounds"]
    assert best_of(folder) == folder / result["best-model"]["file"]
    hits = [
        (load_model(folder, best=True)(torch.as_tensor(e.x)).argmax(1).numpy() == e.labels)
        for e in shards_of(folder).values()
    ]
    assert np.concatenate(hits).mean() == pytest.approx(result["best"]["accuracy"])
    assert f"the model of round {best} is kept, too (--best)" in summary(result, folder)
    app(["export", str(folder), "--best", "--out", str(tmp_path / "mine")], standalone_mode=False)
    text = (tmp_path / "mine.md").read_text()
    assert f"round {best}, the best" in text
    assert f"accuracy {result['best']['accuracy']:.4f}" in text
    assert "are optimistic" in " ".join(text.split())
    with pytest.raises(KeyboardInterrupt):
        run_inline([*TINY, *options, f"runs_dir={folder.parent}", "run_name=broken"], Stopping(2 * best + 1))
    again, resumed = run_inline(resolve([], "", str(folder.parent / "broken"))[0], Display())
    assert (again["best"], again["best-model"]) == (result["best"], result["best-model"])
    assert digest(read_tensors(best_of(resumed))) == digest(read_tensors(best_of(folder)))
    clean([folder])
    assert load_model(folder, best=True).classes == load_model(folder).classes


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", ["gabor", "mlp", "lenet5"])
def test_a_model_is_exported_for_any_number_of_images(model, tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    options = ["task=digits", "strategy=fedavg", f"model={model}", "rounds=1", "nodes=2", "partition=iid"]
    _, folder = run_inline([*options, f"runs_dir={tmp_path / 'runs'}"], Display())
    trained = load_model(folder)
    file, _ = export(trained, "torch", tmp_path / "mine", "")
    x = torch.rand(70, 1, 8, 8)
    torch.testing.assert_close(torch.export.load(file).module()(x), trained(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("strategy", "why"), [("local", "no global model"), ("fml", "private models")])
def test_where_there_is_no_best_model_it_is_said(strategy, why, tmp_path, monkeypatch):
    result, folder = run_at(tmp_path, monkeypatch, "task=digits", f"strategy={strategy}", "dp=none")
    assert why in result["best-model"]["none"]
    assert f"no model of the best round is kept: {result['best-model']['none']}" in summary(
        {**result, "rounds": 2}, folder
    )
    for institution in ("", "institution-1"):
        with pytest.raises(RunError, match=r"no best model|and no institution"):
            load_model(folder, institution, best=True)


def test_what_cannot_be_loaded_or_exported_is_said_in_one_line(ran, tmp_path):
    with pytest.raises(RunError, match="is neither"):
        load_model(tmp_path)
    with pytest.raises(ConfigError, match="--out names a file"):  # as /, . and .. are
        export(load_model(ran[1]), "torch", tmp_path, "")
    with pytest.raises(ConfigError, match="--format must be one of torch, onnx; got 'pickle'"):
        export(load_model(ran[1]), "pickle", tmp_path / "mine", "")
    with pytest.raises((RunError, OSError), match="none"):
        export(load_model(ran[1]), "torch", tmp_path / "none" / "mine", "")
    assert not list(tmp_path.glob("*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.float(), "from 0 to 255"),
        (lambda x: (x / 255 - 0.5) / 0.25, "from -2 to 2"),
        (lambda x: x / 255 * float("nan"), "from nan to nan"),
    ],
)
def test_images_of_a_wrong_range_are_refused_by_the_model(change, message, ran):
    model, x = load_model(ran[1]), torch.arange(256, dtype=torch.uint8).view(4, 1, 8, 8)
    with pytest.raises(DataError, match=rf"bytes \(uint8\), or numbers in \[0, 1\]; got numbers {message}: divide"):
        model(change(x))
    torch.testing.assert_close(model(x / 255), model(x))
    model(x / 255 * 1.1 - 0.05)  # a cubic resize overshoots as much
    assert model(x[:0] / 255).shape == (0, 10)


@pytest.mark.sampled(2, of="slow runs")
def test_a_segmentation_is_exported_with_its_card(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    for n in range(30):
        for kind in ("image", "label"):
            Image.fromarray(rng.integers(0, 2, (64, 64), np.uint8) * 255).save(tmp_path / f"{kind}_{n:02d}.png")
    small = [f"task.data_dir={tmp_path}", "strategy=fedavg", "partition.size=4", "task.size=32", "model.width=4"]
    _, folder = run_at(tmp_path, monkeypatch, "task=isbi2012", *small)
    model = load_model(folder)
    size, text = model.task.size, card(folder, model, "")
    x = torch.rand(3, 1, size, size)
    for form in ("torch", "onnx"):
        file, _ = export(model, form, tmp_path / form, text)
        torch.testing.assert_close(outputs(file, form, x, model.classes), model(x), rtol=0, atol=1e-5)
    assert f"Output: (B, {size}, {size}), probabilities of the foreground" in text
    assert f"Input: images (B, 1, {size}, {size}), float in [0, 1]" in text
    page = (folder / "report.html").read_text()
    assert "Training examples by share of foreground pixels" in page
    assert '<th scope="row">background</th>' in page
