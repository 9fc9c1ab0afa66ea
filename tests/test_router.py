"""A router in front of the engines: the real ones, over two embedded engines (make sglang installs both)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from driver.life import CHILD, free_port
from rollout.sglang.launch import SHIMS
from tests.fleet import BASE, fleet
from tests.rescore import rescore
from tests.service import ServiceUnderTest
from tests.sglang_server import sglang_here
from tests.test_whole import check_accounts

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]

COMMANDS = {"sglang_router": ["-m", "sglang_router.launch_router"], "smg": ["-m", "smg", "launch"]}


@contextlib.contextmanager
def router(kind: str, directory: Path) -> Iterator[str]:
    """A real router without workers. Retries are off: a request that failed must not be run again elsewhere in silence."""
    python, port = str(sglang_here().python), free_port()
    flags = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()), "--policy", "round_robin"]
    flags += ["--disable-retries", "--disable-circuit-breaker"]
    argv = [sys.executable, "-I", "-S", "-c", CHILD, str(os.getpid()), python, *COMMANDS[kind], *flags]
    with (directory / "router.log").open("wb") as log:
        environment = os.environ | {"PYTHONPATH": str(SHIMS), "NO_COLOR": "1"}
        process = subprocess.Popen(argv, stdout=log, stderr=log, env=environment, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(url + "/workers", trust_env=False, timeout=5)
                break
            assert process.poll() is None and time.monotonic() < until, (directory / "router.log").read_text()[-3000:]
            time.sleep(0.1)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def workers(url: str) -> set[str]:
    return {worker["url"].rstrip("/") for worker in httpx.get(url + "/workers", trust_env=False, timeout=5).json()["workers"]}


@pytest.mark.parametrize("kind", list(COMMANDS))
def test_A5_requests_go_through_a_router_and_every_token_is_of_the_version_it_names(tmp_path: Path, kind: str) -> None:
    """An engine is killed and comes back meanwhile; a worker of somebody else's stops the run's requests until it is gone."""
    scorer = tmp_path / "scorer.py"
    scorer.write_text("import random\n\ndef by_chance(response, row):\n    return random.random()\n")
    with router(kind, tmp_path) as url, fleet(tmp_path, 3, None, slow_s=0.005) as (first, second, stranger):
        service = ServiceUnderTest(
            tmp_path / "run",
            "rollout.engines=0",
            f"rollout.engine_urls={json.dumps([first.proxy.url, second.proxy.url])}",
            f"rollout.router_url={url}",
            f"reward.scorers={{'*': {{function: '{scorer}:by_chance'}}}}",
            "batch.samples=4",
            "rollout.n=4",
            "rollout.infrastructure_retries=1000",
            "trainer.learning_rate=0.003",
            "checkpoint.every=1",
            "checkpoint.keep_last=100000",
            "stop.batches=400",
        )
        try:
            for engine in (first, second, stranger):
                engine.wait(60)
            service.up()
            service.submit()
            service.wait(lambda s: s["trained_version"] >= 4, "four batches")
            assert workers(url) == {first.proxy.url, second.proxy.url}
            assert all(engine.ask("/v1/loads").status_code == 200 for engine in (first, second))

            first.kill()
            service.wait(lambda _: workers(url) == {second.proxy.url}, "a dead engine leaves the router")
            version = service.run()["trained_version"]
            service.wait(lambda s: s["trained_version"] >= version + 2, "it goes on with the other")
            first.start()
            first.wait(60)
            service.wait(lambda _: workers(url) == {first.proxy.url, second.proxy.url}, "and is a worker again with its weights")

            httpx.post(url + "/workers", json={"url": stranger.proxy.url}, trust_env=False, timeout=5).raise_for_status()
            service.wait(lambda s: "not of this run" in s["why"].get("rollout", {}).get("reason", ""), "the stranger is named")
            for worker in httpx.get(url + "/workers", trust_env=False, timeout=5).json()["workers"]:
                if worker["url"].rstrip("/") == stranger.proxy.url:
                    httpx.delete(f"{url}/workers/{worker['id']}", trust_env=False, timeout=5).raise_for_status()
            version = service.run()["trained_version"]
            service.wait(lambda s: s["trained_version"] >= version + 4, "it goes on without")
            service.http.post(f"{service.url}/v1/runs/sort-digits/drain")
            status = service.wait(lambda s: s["state"] == "finished", "the end")
            check_accounts(service, status)
            assert status["trajectories"]["discarded"] == 0, status["trajectories"]
        finally:
            service.close()
    found = rescore(service.directory, BASE)
    assert found.rows and found.wrong == [] and found.told_apart > found.spans // 4, found
