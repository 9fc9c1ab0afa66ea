"""What every command of the command line shares: where it prints, how it fails, and the REST client with which it finds its service.

`commands_*.py` build on this and are put together by `driver/cli.py`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import httpx
import typer
from rich.console import Console

PIPED_COLUMNS = 200  # a program that reads wants whole ids, not 80 columns
out = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_COLUMNS)
err = Console(stderr=True)

Url = Annotated[
    str | None,
    typer.Option(
        help="the service's address; default: HEADRACE_URL, or the newest one under ./runs; its token: HEADRACE_TOKEN",
        envvar="HEADRACE_URL",
    ),
]
RunName = Annotated[str | None, typer.Option("--run", help="which run; default: the only one, or the only one that goes on")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="override one key: --set batch.samples=8")]


def fail(text: str, status: int = 1) -> NoReturn:
    err.print(f"[red]error[/red] {text}", highlight=False, soft_wrap=True)
    raise typer.Exit(status)


class Service:
    """The REST client of the command line."""

    def __init__(self, url: str | None, token: str | None = None) -> None:
        token = token or os.environ.get("HEADRACE_TOKEN")
        self._token_from = "it was taken from HEADRACE_TOKEN" if token else "HEADRACE_TOKEN is not set"
        if url is None:
            facts = newest_service()
            if facts is None:
                fail("no service is running here: start one with `headrace up CONFIG.yaml`, or give --url")
            url, token = facts["url"], token or facts["token"]
        elif "://" not in url:
            fail(f"--url {url!r} has no scheme: write http://{url.lstrip('/')}")
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self.url = url
        try:
            self._http = httpx.Client(base_url=url, headers=headers, timeout=60.0, trust_env=False)
        except httpx.InvalidURL:
            self._no_address()

    def _no_address(self) -> NoReturn:
        fail(f"--url {self.url!r} is no address of a service; write it like http://HOST:PORT")

    def call(self, method: str, path: str, **more: Any) -> Any:
        try:
            reply = self._http.request(method, path, **more)
        except (httpx.UnsupportedProtocol, httpx.InvalidURL):
            self._no_address()
        except httpx.TransportError as error:
            fail(f"no answer from {self.url} ({type(error).__name__}); is the service up? headrace up CONFIG.yaml")
        if reply.headers.get("content-type", "").startswith("text/html"):
            fail(f"{self.url}{path} answered {reply.status_code} with a web page: it is not the address of a Headrace service")
        if reply.status_code >= 400:
            source = f" ({self._token_from})" * (reply.status_code == 401)
            try:
                fail(reply.json()["error"]["message"] + source)
            except (ValueError, KeyError, TypeError):
                fail(f"{self.url}{path} answered {reply.status_code}: {reply.text[:300]}")
        return reply.json() if reply.headers.get("content-type", "").startswith("application/json") else reply.text

    def run(self, name: str | None) -> str:
        if name is not None:
            return name
        runs = {run["run_id"]: run["state"] for run in self.call("GET", "/v1/runs")}
        going = [run_id for run_id, state in runs.items() if state not in ("finished", "failed", "stopped", "waiting")]
        for those in (list(runs), going):
            if len(those) == 1:
                return those[0]
        fail(f"say which run: --run {' | '.join(runs)}")


def newest_service() -> dict[str, Any] | None:
    """The newest service.json under ./runs whose process lives."""
    for path in sorted(Path("runs").glob("*/service.json"), key=lambda p: p.stat().st_mtime, reverse=True):
        try:
            facts = json.loads(path.read_text())
            os.kill(facts["pid"], 0)
        except (OSError, ValueError, KeyError):
            continue
        return facts
    return None
