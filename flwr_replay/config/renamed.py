"""Old names of choices and keys: they go on for one version, with a warning."""

import logging
from functools import lru_cache

__all__ = ["key_today", "today", "told"]

CHOICES = {("prior", "masked"): "maskgit"} | {  # renamed in 0.1.0, gone in 0.2.0
    (key, name): "clinical"
    for key in ("task.format", "format")
    for name in ("boneage", "brats", "isic", "retina", "tuberculosis")
}
KEYS = {"slice_steps": "piece_steps", "slice_seconds": "piece_seconds"}  # of generator, the same


@lru_cache(maxsize=256)  # it is said once; a server's words must not fill memory
def today(key: str, value: str) -> str:
    """Return a value by the name that it has today."""
    if (new := CHOICES.get((key, value))) is None:
        return value
    told(f"{key}={value}", f"{key}={new}")
    return new


def key_today(key: str) -> str:
    """Return an option's key by the name that it has today, with its section if it has one."""
    section, dot, name = key.rpartition(".")
    if section not in ("", "generator") or (new := KEYS.get(name)) is None:
        return key
    told(name.replace("_", "-"), new.replace("_", "-"))
    return f"{section}{dot}{new}"


@lru_cache(maxsize=256)
def told(old: str, new: str) -> None:
    """Warn that a name is an old one."""
    logging.getLogger("flwr").warning("%s is called %s now; the old name ends with 0.2.0", old, new)
