"""A live view of one run in the terminal, drawn from REST alone: what a person watches while it trains."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

REFRESH_S = 0.5
OVER = ("finished", "failed", "stopped")
_BLOCKS = "▁▂▃▄▅▆▇█"


class Caller(Protocol):
    def call(self, method: str, path: str, **more: Any) -> Any: ...


def watch(service: Caller, run_id: str, console: Console | None = None) -> dict[str, Any]:
    """Draw until the run is over; returns its last status. Where there is no terminal, prints one line per batch instead."""
    console = console or Console()
    if not console.is_terminal:
        return _lines(service, run_id, console)
    with Live(console=console, refresh_per_second=4, transient=False) as live:
        while True:
            status, view = frame(service, run_id)
            live.update(view)
            if status["state"] in OVER:
                return status
            time.sleep(REFRESH_S)


def frame(service: Caller, run_id: str) -> tuple[dict[str, Any], Panel]:
    """One picture, and the status it was drawn from."""
    base = f"/v1/runs/{run_id}"
    status, queues, why = service.call("GET", base), service.call("GET", f"{base}/queues"), service.call("GET", f"{base}/why")
    staleness, batches = service.call("GET", f"{base}/staleness"), service.call("GET", f"{base}/batches", params={"last": 60})
    return status, draw(status, queues, staleness, batches, why)


def draw(
    status: dict[str, Any], queues: dict[str, Any], staleness: dict[str, Any], batches: list[dict[str, Any]], why: dict[str, Any]
) -> Panel:
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(justify="right", style="bold", width=12)
    grid.add_column(ratio=1)
    grid.add_row("batch", _progress(status))
    rewards = [b["reward_mean"] for b in batches if b.get("reward_mean") is not None]
    grid.add_row("reward", Text(f"{rewards[-1]:.3f}  {spark(rewards)}" if rewards else "no batch yet"))
    histogram = "  ".join(f"{age}: {count}" for age, count in staleness["histogram"].items())
    grid.add_row("staleness", f"max {status['staleness_max']} of {staleness['bound']} allowed   samples by age  {histogram or '-'}")
    lag = status["publish_lag"]
    grid.add_row(
        "version",
        f"trained {status['trained_version']}   served {status['serving_version']}   lag {lag}   saved {status['committed_version']}",
    )
    grid.add_row("in flight", _in_flight(queues))
    grid.add_row(
        "queues",
        f"not sent {queues['not_sent']}   generating {queues['generating']}   scoring {queues['scoring']}   "
        f"ready {queues['ready']}   consumed {queues['consumed']}",
    )
    grid.add_row("busy", _busy(status))
    counted = status["trajectories"]
    grid.add_row("trained", f"{counted['trained']} trajectories   discarded {counted['discarded']}   registered {counted['registered']}")
    grid.add_row("why", Text(why["sentence"], style="yellow"))
    state = f"{status['state']} ({status['ended']})" if status["ended"] else status["state"]
    title = f"headrace · {status['run_id']} · {state} · {status['uptime_s']:.0f} s"
    return Panel(grid, title=title, border_style="red" if status["failure"] else "cyan")


def _progress(status: dict[str, Any]) -> Any:
    done, wanted = status["trained_version"], status["batches_wanted"]
    if not wanted:
        return str(done)
    line = Table.grid(padding=(0, 1))
    line.add_row(f"{done} of {wanted}", ProgressBar(total=wanted, completed=done, width=40))
    return line


def _in_flight(queues: dict[str, Any]) -> Any:
    target, binding = queues["watermark"]["target"], queues["watermark"]["binding"]
    if not target:
        return str(queues["in_flight"])
    line = Table.grid(padding=(0, 1))
    line.add_row(
        f"{queues['in_flight']} of {target}",
        ProgressBar(total=target, completed=min(target, queues["in_flight"]), width=40),
        f"{binding} binds",
    )
    return line


def _busy(status: dict[str, Any]) -> Any:
    line = Table.grid(padding=(0, 1))
    cells: list[Any] = []
    for name in ("engine", "trainer"):
        share = status[f"{name}_busy"] or 0.0
        cells += [f"{name} {share:4.0%}", ProgressBar(total=1.0, completed=share, width=18)]
    line.add_row(*cells)
    return line


def spark(values: list[float]) -> str:
    """A line of blocks between the smallest and the largest value."""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[min(7, int((v - low) / span * 8))] for v in values)


def _lines(service: Caller, run_id: str, console: Console) -> dict[str, Any]:
    """For logs and pipes: one line a batch."""
    seen = -1
    while True:
        status = service.call("GET", f"/v1/runs/{run_id}")
        for batch in service.call("GET", f"/v1/runs/{run_id}/batches", params={"last": 100}):
            if batch["batch_id"] > seen:
                seen = batch["batch_id"]
                console.print(
                    f"batch {seen:4d}  reward {batch['reward_mean']:.3f}  "
                    f"staleness {batch['staleness_mean']:.2f} (max {batch['staleness_max']})  "
                    f"served {batch['serving_version']}  in flight {batch['in_flight']}  ready {batch['ready']}",
                    highlight=False,
                    soft_wrap=True,
                )
        sys.stdout.flush()
        if status["state"] in OVER:
            return status
        time.sleep(REFRESH_S)
