"""Checks of this machine: versions, ports, write access, Ray, GPU."""

import importlib
import os
import shutil
from pathlib import Path

import torch

from flwr_replay.engines.superlink import answers, flower
from flwr_replay.errors import RunError
from flwr_replay.files.atomic import home, make_folder
from flwr_replay.runs.environment import versions

__all__ = ["examine"]

PORTS = {8000: "SuperLink", 9094: "SuperNode"}  # Flower's defaults


def examine() -> tuple[bool, str]:
    """Return whether this machine can run, and one line for each finding."""
    findings: list[tuple[bool, str]] = []
    for name, version in versions().items():
        missing = f"{name} is not installed: pip install {name}"
        findings.append((version != "absent", missing if version == "absent" else f"{name} {version}"))
    for port, who in PORTS.items():
        used = "in use; if no SuperLink of yours runs there, choose another with --port"
        advice = used if answers(f"127.0.0.1:{port}") else "free"
        findings.append((True, f"port {port} ({who}): {advice}"))
    for folder, what in ((home(), "home"), (Path("runs").absolute(), "runs-dir")):
        existed = folder.exists()
        try:
            make_folder(folder, what)
            findings.append((True, f"{what}: {folder} is writable, {shutil.disk_usage(folder).free / 1e9:.0f} GB free"))
            if not existed:
                folder.rmdir()
        except RunError as error:
            findings.append((False, str(error)))
    for tool in ("flwr", "flower-superlink", "flower-supernode"):
        path = shutil.which(flower(tool))
        findings.append((path is not None, f"{tool}: {path or 'not on PATH; activate the environment, or use uv run'}"))
    try:
        importlib.import_module("ray")
        findings.append((True, f"Ray can be imported; {os.cpu_count()} cores for its actors"))
    except ImportError as error:
        findings.append((False, f"Ray cannot be imported: {error}"))
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    names = ", ".join(map(torch.cuda.get_device_name, gpus)) or "none; training runs on the CPU"
    findings.append((True, f"GPU: {names}"))
    return all(ok for ok, _ in findings), "\n".join(f"{'ok ' if ok else 'NO '} {text}" for ok, text in findings)
