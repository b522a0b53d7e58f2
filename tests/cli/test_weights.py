"""`weights get`, from a hub of this machine that speaks as timm's does."""

import shlex
import threading
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from flwr_replay.config.compose import compose
from flwr_replay.models import build

NAME, FILE = "test_resnet.r160_in1k", "test_resnet.r160_in1k.safetensors"  # half a million numbers


class Hub(BaseHTTPRequestHandler):
    """Sends to another host for the file, as timm's does; `fault` says what is wrong with it."""

    fault = ""

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        held, fault = self.server.held, self.fault
        if fault == "404":
            return self.say(404, {"X-Error-Code": "EntryNotFound", "Content-Length": 0})
        if fault == "login page":
            return self.say(200, {"Content-Type": "text/html", "Content-Length": 6}, b"<html>" if body else b"")
        if not body or self.path != "/there":
            stated = {"X-Repo-Commit": "c" * 40, "X-Linked-Size": len(held), "Content-Length": 0}
            digest = sha256(held + b"!" if fault == "other bytes" else held).hexdigest()
            there = f"http://localhost:{self.server.server_port}/there"
            return self.say(302, stated | {"X-Linked-Etag": f'"{digest}"', "ETag": '"no"', "Location": there})
        size = len(held) // 2 if fault == "half" else len(held)
        return self.say(200, {"Content-Length": size}, held[: len(held) // 2] if fault in ("cut", "half") else held)

    def say(self, code, headers, body=b""):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path_factory):
    """A hub with the weights of a small architecture, as it was made."""
    net = timm.create_model("test_resnet")
    save_file(net.state_dict(), held := tmp_path_factory.mktemp("hub") / "w.safetensors")
    with ThreadingHTTPServer(("127.0.0.1", 0), type("OneHub", (Hub,), {})) as server:
        server.held, server.net = held.read_bytes(), net
        point_hub_at(monkeypatch, server.server_port)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def point_hub_at(monkeypatch, port):
    """Do as HF_ENDPOINT does, which is read only once."""
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    template = f"http://127.0.0.1:{port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def test_weights_are_fetched_once_and_a_run_takes_them(flwr_replay, hub, tmp_path):
    code, out, err = flwr_replay("weights", "get", "test_resnet")
    assert code == 0, err
    place, facts, words, _ = out.splitlines()
    assert place == str(tmp_path / FILE)
    assert (tmp_path / FILE).read_bytes() == hub.held
    assert facts == f"SHA-256 {sha256(hub.held).hexdigest()}, {len(hub.held):,} bytes, licence: apache-2.0"
    config = compose([*shlex.split(words.removeprefix("In a run: ")), "model.train=head"])
    model = build(config.model, config.task, 0).eval()
    theirs = timm.create_model("test_resnet", num_classes=0).eval()
    theirs.load_state_dict(hub.net.state_dict(), strict=False)
    x = torch.rand(2, 1, 8, 8)
    with torch.no_grad():
        prepared = model[0].stages[0].prepared(x)
        assert torch.allclose(model[0](x), theirs(prepared), atol=1e-5)
    written = (tmp_path / FILE).stat().st_mtime_ns
    code, again, _ = flwr_replay("weights", "get", NAME)
    assert (code, again) == (0, out.replace(FILE, f"{FILE} was there already", 1))
    assert (tmp_path / FILE).stat().st_mtime_ns == written


FAULTS = {
    "cut": "copy its file here",
    "half": "copy its file here",
    "other bytes": "must have the SHA-256 that its hub states",
    "404": "choose other weights",
    "login page": "copy its file here",
}


@pytest.mark.parametrize(("fault", "line"), FAULTS.items(), ids=FAULTS)
def test_what_is_not_whole_is_one_line_and_no_file(flwr_replay, hub, tmp_path, monkeypatch, fault, line):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    hub.RequestHandlerClass.fault = fault
    code, out, err = flwr_replay("weights", "get", NAME)
    assert (code, out) == (2, "")
    assert line in err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_without_a_network_the_line_says_what_to_do(flwr_replay, monkeypatch, tmp_path):
    point_hub_at(monkeypatch, 9)
    code, _, err = flwr_replay("weights", "get", "resnet18")
    assert code == 2
    assert "`flwr-replay weights get resnet18.a1_in1k` on another machine, copy its file here" in err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_another_file_stays_and_other_names_are_refused(flwr_replay, hub, tmp_path):
    (tmp_path / FILE).write_bytes(b"mine")
    for words, line in (
        ([NAME], "it is another: move it"),
        ([NAME, "--to", "w.pth"], "ends in .safetensors"),
        ([NAME, "--to", "none/w.safetensors"], "No such file or directory"),
        (["gcvit_tiny.in1k"], "fetch https://"),
        (["botnet50ts_256"], "nobody published any"),
        (["resnet81"], "did you mean resnet18"),
    ):
        code, out, err = flwr_replay("weights", "get", *words)
        assert (code, out) == (2, "")
        assert line in err.splitlines()[-1]
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [(FILE, b"mine")]
