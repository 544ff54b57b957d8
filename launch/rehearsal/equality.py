"""Whether two runs ended with the same bits."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from launch.errors import Failed
from training.snapshots import files
from training.snapshots.manifest import BEST_FOLDER


def final_digest(checkpoint_dir: Path, model_dir: Path, step: int) -> str:
    """A digest of the model and optimizer state with which a run ended after `step` steps.

    Where the best model was exported, that too. Raises Failed if the last snapshot is not whole, or
    if the exported model is another than it says.
    """
    try:
        files.verify(checkpoint_dir, step)
        state = files.load(checkpoint_dir, step)
    except files.NotASnapshot as error:
        raise Failed(f"the run ended without a whole snapshot of step {step}: {error}") from error
    exported = torch.load(model_dir / "model.pt", map_location="cpu", weights_only=True)
    parts = {"model": state["model"], "optimizer": state["optimizer"]}
    said = json.loads((model_dir / "exported.json").read_text())
    if said["export"] == "best":
        parts["best"] = _best(checkpoint_dir, said["step"])
    if digest_of(exported) != digest_of(parts.get("best", parts["model"])):
        raise Failed(f"the exported model.pt is not the {said['export']} model of the run")
    return digest_of(parts)


def _best(checkpoint_dir: Path, step: int) -> Any:
    try:
        files.verify(checkpoint_dir / BEST_FOLDER, step)
    except files.NotASnapshot as error:
        raise Failed(f"the run ended without a whole best model of step {step}: {error}") from error
    path = checkpoint_dir / BEST_FOLDER / files.data_name(step)
    return torch.load(path, map_location="cpu", weights_only=True)["model"]


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
