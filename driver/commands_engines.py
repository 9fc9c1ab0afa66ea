"""The command line: the engines of a run, and engines that are started by hand for runs elsewhere."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from driver.terminal import RunName, Service, Url, fail, out
from rollout.sglang import launch
from rollout.sglang.spec import SglangSpec, located

COLOURS = {"open": "green", "shut": "green", "starting": "yellow"}
MOST_CONTEXT = 4096  # where nobody says: as much KV cache as a long context needs would be more than many machines have


def engines(url: Url = None, run: RunName = None) -> None:
    """Every engine of a run: its state, since when, and why it is out of use."""
    service = Service(url)
    table = Table("engine", "state", "for", "version", "requests", "why", box=None, pad_edge=False)
    for one in service.call("GET", f"/v1/runs/{service.run(run)}/engines"):
        colour = COLOURS.get(one["state"], "red")
        requests = f"{one['open_requests']} of {one['capacity']}" if one["capacity"] else ""
        why = "" if one["state"] == "open" else one["reason"]
        state = f"[{colour}]{one['state']}[/{colour}]"
        table.add_row(one["engine_id"], state, f"{one['state_s']:.0f} s", one["version"] or "", requests, escape(why))
    out.print(table, highlight=False)


def engine(
    model_path: Annotated[Path, typer.Option(help="a Hugging Face checkpoint directory: the model.path of the run")],
    port: Annotated[int, typer.Option(min=1, max=65535)] = 30000,
    host: Annotated[str, typer.Option(help="0.0.0.0 for runs on other machines; then give it a key: -- --api-key KEY")] = "127.0.0.1",
    sglang: Annotated[bool, typer.Option("--sglang", help="a real SGLang server; else the embedded engine")] = False,
    python: Annotated[Path | None, typer.Option(help="the Python that has sglang; default: .venv-sglang, of `make sglang`")] = None,
    context_length: Annotated[int | None, typer.Option(help="default: the model's, at most 4,096")] = None,
    dtype: Annotated[str, typer.Option(help="trainer.dtype of the run: float32 or bfloat16")] = "float32",
    more: Annotated[list[str] | None, typer.Argument(help="after --: further flags of the server itself")] = None,
) -> None:
    """Start an engine for runs elsewhere, here and now; it ends with Ctrl-C. A run takes it by rollout.engine_urls."""
    try:
        most = json.loads((model_path / "config.json").read_text()).get("max_position_embeddings") or MOST_CONTEXT
    except (OSError, ValueError):
        fail(f"{model_path} is no Hugging Face checkpoint directory: it has no config.json", 2)
    length = context_length or min(most, MOST_CONTEXT)
    environment = dict(os.environ)
    if sglang:
        try:
            spec = located(SglangSpec(python=python, args=["--host", host, *(more or [])]), Path.cwd())
        except ValueError as error:
            fail(str(error), 2)
        threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
        server = launch.Server(
            model_path=model_path.absolute(),
            port=port,
            first_device=0,
            context_length=length,
            max_running_requests=128,
            stream_interval=16,
            seed=0,
            dtype=dtype,
        )
        argv, environment = launch.command(spec, server), environment | launch.environment(spec, threads)
    else:
        flags = {"--model-path": model_path, "--host": host, "--port": port, "--context-length": length, "--dtype": dtype}
        ours = ["--stream-interval", "16", *(str(part) for flag in flags.items() for part in flag), *(more or [])]
        argv = [sys.executable, "-P", "-m", "rollout.engine", *ours]
    sys.stdout.flush()
    os.execve(argv[0], argv, environment)
