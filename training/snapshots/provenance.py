"""What the manifest of any state says about the run that made it."""

import os
from typing import Any

from training.settings import TrainingSettings


def job_name() -> str:
    """The SageMaker job that this attempt belongs to; empty outside of SageMaker."""
    return os.environ.get("TRAINING_JOB_NAME", "")


def provenance(settings: TrainingSettings, step: int, world_size: int) -> dict[str, Any]:
    """The manifest's fields that do not depend on what the file holds."""
    return {
        "run_name": settings.run_name,
        "step": step,
        "samples_seen": step * settings.global_batch_size,
        "world_size": world_size,
        "job_name": job_name(),
        "settings": settings.fingerprint(),
    }
