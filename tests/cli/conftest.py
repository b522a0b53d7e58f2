"""Commands in this process, and a deployment's folders."""

import re
import runpy
import socket
import ssl
import subprocess
import sys
import threading

import pytest
from deployed import HOSPITALS, STUDY
from harness import command

from flwr_replay.cli.main import main
from flwr_replay.engines.certificates import SERVER, SERVER_KEY
from flwr_replay.engines.superlink import free_port


@pytest.fixture
def flwr_replay(monkeypatch, capsys, tmp_path):
    """Run a command in this process, in an empty folder; return exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["flwr-replay", *words])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Two clinics; north has its data and key, and the server that it is told of answers."""
    root = tmp_path_factory.mktemp("deploy")
    runpy.run_path(str(HOSPITALS / "make_data.py"))["write_clinics"](root / "data")
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        words = ["--clinics", "north,south", "--address", f"localhost:{port}", "--out", str(root / "dep")]
        assert command(patch, "deploy", "init", *words, *STUDY) == 0
    north, certificates = root / "dep" / "north", root / "dep" / "coordinator" / "certificates"
    subprocess.run([north / "make-key.sh"], check=True)
    (north / "data").symlink_to(root / "data" / "clinic-a")
    for file in (root / "dep").glob("*/clinic.env"):
        file.write_text(re.sub("PORT=.*", f"PORT={free_port()}", file.read_text()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / SERVER, certificates / SERVER_KEY)
    with socket.create_server(("127.0.0.1", port)) as server:
        threading.Thread(target=answering, args=(server, context), daemon=True).start()
        yield root / "dep"


def answering(server, context):
    while True:
        try:
            plain = server.accept()[0]
        except OSError:
            return
        try:
            context.wrap_socket(plain, server_side=True).close()
        except OSError:
            plain.close()
