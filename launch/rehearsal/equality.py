"""Whether two runs ended with the same bits."""

import hashlib
from pathlib import Path
from typing import Any

import torch

from launch.errors import Failed
from training.snapshots import files


def final_digest(checkpoint_dir: Path, model_dir: Path, step: int) -> str:
    """A digest of the model and optimizer state with which a run ended after `step` steps.

    Raises Failed if its last snapshot is not whole, or if the exported model is another.
    """
    try:
        files.verify(checkpoint_dir, step)
        state = files.load(checkpoint_dir, step)
    except files.NotASnapshot as error:
        raise Failed(f"the run ended without a whole snapshot of step {step}: {error}") from error
    exported = torch.load(model_dir / "model.pt", map_location="cpu", weights_only=True)
    if digest_of(exported) != digest_of(state["model"]):
        raise Failed("the exported model.pt is not the model of the last snapshot")
    return digest_of({"model": state["model"], "optimizer": state["optimizer"]})


def digest_of(value: Any) -> str:
    """SHA-256 over names, types, shapes and bytes, whatever the order of the names."""
    digest = hashlib.sha256()
    _add(digest, value)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(f"{key}:".encode())
            _add(digest, value[key])
    elif isinstance(value, (list, tuple)):
        digest.update(f"[{len(value)}]".encode())
        for item in value:
            _add(digest, item)
    else:
        digest.update(repr(value).encode())
