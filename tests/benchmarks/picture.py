"""The picture of a benchmark: how long a save holds up training, for each way and each model."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from tests.benchmarks.contenders import Dcp, DcpAsyncStager, Ours, TorchSave
from tests.benchmarks.measure import Comparison
from tests.benchmarks.report import FROM_MILLIONS, STALL_LIMIT, Report

_COLORS = {
    Ours.name: "#2e7d32",
    DcpAsyncStager.name: "#5b9bd5",
    Dcp.name: "#1b4f8a",
    TorchSave.name: "#8c8c8c",
}
_ROW, _GAP = 1.0, 1.1  # a bar, and the space between two models


def draw(report: Report, path: Path) -> None:
    """Write the picture as a PNG file."""
    comparisons = list(report.comparisons.values())
    figure = Figure(figsize=(10, 1.3 + 1.75 * len(comparisons)), layout="constrained")
    axes = figure.subplots()
    top = 0.0
    for millions, one in report.comparisons.items():
        if millions >= FROM_MILLIONS:
            _draw_limit(axes, one, top)
        top = _draw_model(axes, one, top) + _GAP
    stalls = [costs.stall * 1000 for one in comparisons for costs in one.costs.values()]
    limits = min(stalls) / 4, max(stalls) * 10  # room for the names behind the bars
    axes.set(xscale="log", xlim=limits, ylim=(top - _GAP + 0.2, -1.3), yticks=[])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel(
        "ms that a save holds up training (log scale); the black line is 1/100 of torch.save"
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    _draw_title(axes, comparisons[-1], report)
    figure.savefig(path, dpi=110)


def _draw_title(axes: Any, largest: Comparison, report: Report) -> None:
    stalls = {name: costs.stall for name, costs in largest.costs.items()}
    times = stalls[TorchSave.name] / stalls[Ours.name]
    title = (
        f"A snapshot holds up training {times:.0f} times less than torch.save, at {_size(largest)}"
    )
    axes.set_title(title, loc="left", pad=24, size=14, weight="bold", color=_COLORS[Ours.name])
    at = {"xycoords": "axes fraction", "xytext": (0, 8), "textcoords": "offset points"}
    axes.annotate(report.setting, (0, 1), **at, color="0.25")


def _draw_limit(axes: Any, one: Comparison, top: float) -> None:
    limit = one.costs[TorchSave.name].stall * 1000 * STALL_LIMIT
    axes.plot([limit] * 2, [top - 0.5, top + 0.5], color="black", lw=1.5)


def _draw_model(axes: Any, one: Comparison, top: float) -> float:
    """A model's bars from `top` downwards; returns where they end."""
    state = f"{_size(one)}, {one.state_bytes / 1e6:.0f} MB of state"
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}  # a limit stays behind a name
    behind = {"textcoords": "offset points", "va": "center", "bbox": box}
    across = axes.get_yaxis_transform()
    axes.text(0.0, top - 0.85, f" {state}", transform=across, va="center", weight="bold")
    for number, (name, costs) in enumerate(one.costs.items()):
        y, stall = top + number * _ROW, costs.stall * 1000
        ours = name == Ours.name
        axes.barh(y, stall, height=0.8, color=_COLORS[name])
        weight = "bold" if ours else "normal"
        text = f"{name}  {stall:.{1 if stall < 100 else 0}f} ms"
        axes.annotate(text, (stall, y), xytext=(6, 0), **behind, color=_COLORS[name], weight=weight)
    return top + len(one.costs) * _ROW


def _size(one: Comparison) -> str:
    return f"{one.parameters / 1e6:.0f} million parameters"
