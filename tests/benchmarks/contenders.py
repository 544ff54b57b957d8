"""The ways to save that are compared. All save the same state; none knows how it is measured."""

import os
import shutil
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from tests.benchmarks.job import Job, sync_directory
from training.snapshots.delivery import Delivery
from training.snapshots.provenance import provenance
from training.snapshots.staging import Staging
from training.snapshots.writer import Writer

DEADLINE = 120.0


class Contender(Protocol):
    """Saves between two optimizer steps."""

    name: str

    def save(self) -> None:
        """Begin a save of the job's state, and return as soon as training may go on."""

    @property
    def in_flight(self) -> bool:
        """Whether something is still being copied or written behind the training."""

    @property
    def waited_seconds(self) -> float:
        """How long the next optimizer step was held up for the last save."""

    def finish(self) -> float:
        """Wait until the save is durable; the time.perf_counter() at which it was."""

    def close(self) -> None:
        """Let go of threads, memory and the optimizer."""


class Ours:
    """This project: references, a copy in the background, digests, fsync, manifest, pruning."""

    name = "this project"

    def __init__(self, job: Job) -> None:
        self._job, self._whole = job, ()
        Path(job.settings.checkpoint_dir).mkdir(parents=True, exist_ok=True)
        self._staging = _Noted(job.replica)
        delivery = Delivery(job.settings.checkpoint_dir, "")
        self._writer = Writer(job.settings, self._staging, delivery, self._describe)

    def save(self) -> None:
        started = time.perf_counter()
        self._staging.begin(self._job.step)
        begin_seconds = time.perf_counter() - started
        self._writer.start(self._job.step, self._job.norm, begin_seconds, self._whole, frozenset())

    @property
    def in_flight(self) -> bool:
        return self._staging.in_use

    @property
    def waited_seconds(self) -> float:
        return self._staging.waited_seconds

    def finish(self) -> float:
        written = self._writer.collect(wait=True)
        kept = [step for step in self._whole if step not in written.deleted]
        self._whole = (*kept, written.step)
        return self._staging.released_at

    def close(self) -> None:
        self._writer.close()
        self._staging.close()

    def _describe(self, step: int) -> dict[str, Any]:
        return {
            **provenance(self._job.settings, step, world_size=1),
            "dataset_samples": len(self._job.dataset),
            "optimizer": type(self._job.replica.optimizer).__name__,
        }


class _Noted(Staging):
    """Knows when the writer was done with the state: then the snapshot is whole."""

    released_at = 0.0

    def release(self) -> None:
        super().release()
        self.released_at = time.perf_counter()


class TorchSave:
    """`torch.save` between two steps, as most tutorials have it; fsync comes after the stall."""

    name = "torch.save"
    in_flight = False
    waited_seconds = 0.0

    def __init__(self, job: Job) -> None:
        self._job, self.path = job, job.directory / "torch.pt"

    def save(self) -> None:
        self.path.unlink(missing_ok=True)
        torch.save(self._job.state, self.path)

    def finish(self) -> float:
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())
        sync_directory(self.path.parent)
        return time.perf_counter()

    def close(self) -> None:
        self.path.unlink(missing_ok=True)


class Dcp:
    """`torch.distributed.checkpoint.async_save` as it comes: copies, then writes in a thread."""

    name = "DCP async_save"
    waited_seconds = 0.0

    def __init__(self, job: Job) -> None:
        self._job = job
        self._directory = job.directory / type(self).__name__
        self._upload: Future[Any] | None = None
        self._uploaded_at = 0.0

    def save(self) -> None:
        self._watch(self._begin())

    @property
    def in_flight(self) -> bool:
        return self._upload is not None and not self._upload.done()

    def finish(self) -> float:
        self._upload.result(DEADLINE)
        while not self._uploaded_at:  # the callback comes after the result
            time.sleep(0.0005)
        shutil.rmtree(self._directory)
        return self._uploaded_at

    def close(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def _begin(self, **options: Any) -> Any:
        return dcp.async_save(
            self._job.state,
            checkpoint_id=self._directory,
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
            **options,
        )

    def _watch(self, upload: "Future[Any]") -> None:
        def note(_: object) -> None:
            self._uploaded_at = time.perf_counter()

        self._upload, self._uploaded_at = upload, 0.0
        upload.add_done_callback(note)


class DcpAsyncStager(Dcp):
    """The same with a stager that copies in a thread too, into memory that it keeps.

    The optimizer must not change what is still being copied, so the next step waits for that; DCP
    leaves this to its user.
    """

    name = "DCP, async stager"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
        )
        self._staged: Future[None] | None = None
        self._hook = job.replica.optimizer.register_step_pre_hook(lambda *_: self._wait())

    def save(self) -> None:
        self.waited_seconds = 0.0
        response = self._begin(async_stager=self._stager)
        self._staged = response.staging_completion
        self._watch(response.upload_completion)

    def close(self) -> None:
        self._hook.remove()
        self._stager.close()
        super().close()

    def _wait(self) -> None:
        if self._staged is not None and not self._staged.done():
            started = time.perf_counter()
            self._staged.result(DEADLINE)
            self.waited_seconds += time.perf_counter() - started


CONTENDERS: tuple[type[Contender], ...] = (Ours, DcpAsyncStager, Dcp, TorchSave)
