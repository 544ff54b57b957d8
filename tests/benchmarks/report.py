"""The table, the bars that have to be met, and what `benchmark.json` holds."""

import dataclasses
import datetime
import json
import platform
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks.contenders import DcpAsyncStager, Ours, TorchSave
from tests.benchmarks.loops import Overhead, Throughput
from tests.benchmarks.machine import described
from tests.benchmarks.measure import Comparison
from tests.benchmarks.start import Start

FROM_MILLIONS = 20  # below, what does not depend on the size decides: calls, and torch's parser
STALL_LIMIT = 0.01  # of what torch.save takes
BUSY = 0.05  # from which share of others the numbers are about them


@dataclass(frozen=True)
class Bar:
    """A promise, and what was measured."""

    promise: str
    measured: float
    limit: float
    at_least: bool = False
    strictly: bool = False

    @property
    def met(self) -> bool:
        if self.at_least:
            return self.measured >= self.limit
        return self.measured < self.limit if self.strictly else self.measured <= self.limit

    @property
    def sign(self) -> str:
        return "≥" if self.at_least else "<" if self.strictly else "≤"


@dataclass
class Report:
    """All that was measured in one run."""

    comparisons: dict[int, Comparison]  # by the millions of parameters that were asked for
    throughput: Throughput | None = None
    overhead: Overhead | None = None
    start: Start | None = None
    others: float = 0.0  # the share of the machine that was not this process's
    began: datetime.datetime = dataclasses.field(
        default_factory=lambda: datetime.datetime.now(datetime.UTC)
    )

    @property
    def setting(self) -> str:
        """When and where, in words."""
        busy = f", others took {self.others:.0%} of it" if self.others >= 0.01 else ""
        return f"{self.began:%Y-%m-%d}, {described()}{busy}"

    @property
    def bars(self) -> list[Bar]:
        """Every promise that this run could check."""
        return list(self._bars())

    @property
    def met(self) -> bool:
        return all(bar.met for bar in self.bars)

    def show(self, console: Console) -> None:
        """Print what was measured, and whether it is good enough."""
        console.print(self._costs())
        console.print(self._verdicts())
        console.print(self.setting)
        if self.others > BUSY:
            console.print("[red]The machine was busy with something else: measure again.[/]")

    def write(self, path: Path) -> None:
        """All numbers as JSON."""
        values: dict[str, Any] = {
            "began": self.began.isoformat(timespec="seconds"),
            "machine": described(),
            "share_of_others": round(self.others, 4),
            "python": platform.python_version(),
            "bars": [{**dataclasses.asdict(bar), "met": bar.met} for bar in self.bars],
            "comparisons": {m: dataclasses.asdict(c) for m, c in self.comparisons.items()},
        }
        for part in ("throughput", "overhead", "start"):
            if (found := getattr(self, part)) is not None:
                values[part] = dataclasses.asdict(found)
        path.write_text(json.dumps(values, indent=1) + "\n")

    def _bars(self) -> Iterator[Bar]:
        for millions, one in self.comparisons.items():
            if millions < FROM_MILLIONS:
                continue
            stall = one.costs[Ours.name].stall
            yield Bar(
                f"{millions} M: stall of a save / torch.save's",
                stall / one.costs[TorchSave.name].stall,
                STALL_LIMIT,
            )
            yield Bar(
                f"{millions} M: stall of a save / DCP's with an asynchronous stager",
                stall / one.costs[DcpAsyncStager.name].stall,
                1.0,
                strictly=True,
            )
            yield Bar(
                f"{millions} M: verified resume / torch.load and load_state_dict",
                one.resume(Ours.name) / one.resume(TorchSave.name),
                0.8,
            )
        if self.throughput:
            yield Bar(
                "20 M: throughput with a snapshot every 30 s / without",
                self.throughput.ratio,
                0.98,
                at_least=True,
            )
        if self.overhead:
            yield Bar("20 M: a step of the loop / of a bare loop", self.overhead.ratio, 1.02)
        if self.start:
            seconds = statistics.median(self.start.first_step_seconds)
            share = statistics.median(self.start.data_wait_share)
            yield Bar("sample job: seconds from its imports to its first step", seconds, 2.0)
            yield Bar("sample job: share of a step that waits for data", share, 0.01)

    def _costs(self) -> Table:
        table = Table(title="What a save costs (medians; a save of the same state, in turn)")
        for name in ("parameters", "a save by", "stall", "of torch.save's", "steps meanwhile"):
            table.add_column(name, justify="left" if name == "a save by" else "right")
        for name in ("lost in all", "until durable", "extra memory", "resume"):
            table.add_column(name, justify="right")
        for one in self.comparisons.values():
            about = iter(
                (
                    f"{one.parameters / 1e6:.1f} M",
                    f"[dim]{one.state_bytes / 1e6:.0f} MB of state[/]",
                    f"[dim]{one.step_seconds:.3f} s a step[/]",
                )
            )
            for name, costs in one.costs.items():
                resumed = one.resume_seconds.get(name)
                table.add_row(
                    next(about, ""),
                    name,
                    f"{costs.stall * 1000:.1f} ms",
                    _share(costs.stall / one.costs[TorchSave.name].stall),
                    f"× {costs.slow_down:.2f}" if costs.slow_down else "none",
                    f"{costs.lost * 1000:.0f} ms",
                    f"{costs.seconds_to_whole:.2f} s",
                    f"{costs.memory_bytes / one.state_bytes:.2f} × state",
                    f"{one.resume(name):.2f} s" if resumed else "",
                )
            table.add_section()
        return table

    def _verdicts(self) -> Table:
        table = Table("what", "measured", "bar", "")
        for bar in self.bars:
            verdict = "[green]met[/]" if bar.met else "[bold red]MISSED[/]"
            table.add_row(bar.promise, f"{bar.measured:.4f}", f"{bar.sign} {bar.limit:g}", verdict)
        return table


def _share(ratio: float) -> str:
    return f"1/{1 / ratio:.0f}" if ratio < 0.5 else f"{ratio:.2f}"
