"""Published weights on timm's hub: a command fetches them, and nothing else does."""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from flwr_replay.config.sections import require
from flwr_replay.errors import RunError
from flwr_replay.files.atomic import read_bytes, write_atomic
from flwr_replay.files.disk import there, writing
from flwr_replay.models.timm_models import published

__all__ = ["Fetched", "fetch", "fetched"]

HELD = "model.safetensors"  # in each repository of timm's


class Fetched(NamedTuple):
    """Published weights in a file: their name with its tag, SHA-256, bytes, the licence's tag, whether they are new."""

    name: str
    file: Path
    sha256: str
    size: int
    licence: str
    new: bool


def fetch(name: str, to: str) -> Fetched:
    """Download published weights, whole or not at all, unless the file has them already.

    Parameters
    ----------
    name : str
        Of an architecture, and after a dot the tag of its weights; without one, the first that timm names.
    to : str
        The file; if empty, it is called as the weights are, in the working directory.

    Raises
    ------
    ConfigError
        If timm is missing or knows no such weights, or the file's name does not end in .safetensors.
    RunError
        If the hub does not answer or has not the weights, what came is not what it states, or the file is another.
    """
    repository, full = _on_hub(name)
    licence = published(name).license or "not stated"
    file = Path(to or f"{full}.safetensors").expanduser().absolute()
    require(
        file.suffix.lower() == ".safetensors" and not file.is_dir(),
        f"--to must be a file whose name ends in .safetensors; got {file}",
    )
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    url = hf_hub_url(repository, HELD)
    with _answering(full, url):
        stated = get_hf_file_metadata(url)  # of a large file the hub's ETag is the SHA-256
    if there(file):
        content = read_bytes(file)
        if sha256(content).hexdigest() != stated.etag:
            raise RunError(
                f"{file} must be new, or already hold {full}; it is another: move it, or choose another --to"
            )
        return Fetched(full, file, str(stated.etag), len(content), licence, new=False)
    with writing(file), TemporaryDirectory(prefix=".", suffix=".tmp", dir=file.parent) as folder:
        with _answering(full, url):
            hf_hub_download(repository, HELD, revision=stated.commit_hash, local_dir=folder)
        content = read_bytes(Path(folder, HELD))
        if (got := sha256(content).hexdigest()) != stated.etag:
            raise RunError(f"{url} must have the SHA-256 that its hub states, {stated.etag}; got {got}: fetch it again")
        write_atomic(file, content)
    return Fetched(full, file, got, len(content), licence, new=True)


def fetched(weights: str) -> Path:
    """Return the file of weights on timm's hub that timm fetched before; nothing is downloaded.

    Raises
    ------
    ConfigError
        If weights of this name are not on this machine.
    """
    from huggingface_hub import try_to_load_from_cache

    repository, full = _on_hub(weights)
    file = try_to_load_from_cache(repository, HELD)
    require(
        isinstance(file, str),
        f"model.weights must be a file, or a name on timm's hub whose weights timm fetched; got {weights!r}: where "
        f"there is a network, `flwr-replay weights get {full}` fetches them; then model.weights=FILE",
    )
    return Path(str(file))


def _on_hub(name: str) -> tuple[str, str]:
    """Return the repository of weights, and their name with its tag."""
    weights: Any = published(name)
    full = ".".join(filter(None, (weights.architecture, weights.tag)))
    require(
        bool(weights.hf_hub_id),
        f"the weights {full} are not on timm's hub: "
        + (f"fetch {weights.url}, and give that file, model.weights=FILE" if weights.url else "nobody published any"),
    )
    return weights.hf_hub_id, full


@contextmanager
def _answering(name: str, url: str) -> Iterator[None]:
    """Turn any error of the network into one line; those of the disk have a number."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno:
            raise
        line = f"{type(error).__name__} {' '.join(str(error).split())[:200]}"
        advice = (
            f"where there is no network, run `flwr-replay weights get {name}` on another machine, copy its file here, "
            "and give that, model.weights=FILE"
        )
        if getattr(error, "response", None) is not None:
            advice = "choose other weights, or ask who runs this hub"
        raise RunError(f"the weights {name} must come whole from {url}; {line}: {advice}") from None
