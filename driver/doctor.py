"""`headrace doctor`: what this machine and these engines can do, and whether a configuration can run. Nothing is started.

Each finding says what was looked at, whether a run needs it, and for what is missing the remedy.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from driver.config import ConfigError, load_config
from driver.machine import Finding, huge_pages, left_behind, on_disk, room
from driver.mooncake import absent, lacking
from driver.planned import plan_of
from driver.planner import PlanError
from driver.settings import RunConfig
from driver.transport import Transports
from rollout.answer import EngineError
from rollout.capabilities import TRIED
from rollout.client import EngineClient, make_http
from rollout.router import RouterClient
from rollout.sglang.spec import SglangSpec, has_cuda_device, located, version_of
from store.mooncake_client import installed

TRAINER_PACKAGES = ("torch", "megatron-core", "mbridge", "transformers", "safetensors")


def examine(path: Path | None, overrides: list[str]) -> list[Finding]:
    """Everything, in the order in which it should be put right."""
    config: RunConfig | None = None
    findings = [_python()]
    if path is not None:
        try:
            config = load_config(path, overrides)
            engines = config.rollout.engines + len(config.rollout.engine_urls)
            findings.append(Finding("configuration", "ok", f"{path}: run {config.run_id}, {engines} engine(s)"))
        except ConfigError as error:
            findings.append(Finding("configuration", "missing", str(error)))
    findings += [
        _trainer(config),
        _gpu(),
        _transformer_engine(),
        _sglang(config),
        *room(config),
        *on_disk(config),
        *huge_pages(config),
        _cores(config),
    ]
    findings += left_behind(config)
    findings.append(_mooncake(config))
    if config is not None:
        findings.append(_plan(config))
    if config is not None and (config.rollout.engine_urls or config.rollout.router_url):
        findings += asyncio.run(_elsewhere(config))
    return findings + list(_port(config))


async def _elsewhere(config: RunConfig) -> list[Finding]:
    """Engines that are started elsewhere, and a router, asked as a run would ask them."""
    rollout = config.rollout
    async with make_http() as http:
        clients = [EngineClient(url, http, rollout.engine_api_key, admin_key=rollout.engine_admin_key) for url in rollout.engine_urls]
        findings = list(await asyncio.gather(*(_engine(client, Transports(config.push.transport, {})) for client in clients)))
        if rollout.router_url is not None:
            findings.append(await _router(RouterClient(rollout.router_url, http, rollout.router_api_key)))
    return findings


async def _engine(client: EngineClient, transports: Transports) -> Finding:
    what = f"engine {client.url}"
    try:
        can = await client.capabilities()
        transport = transports.name_for(client, can)
    except EngineError as error:
        return Finding(what, "missing", f"{error}; start it, or take it out of rollout.engine_urls")
    kind = "embedded, as SGLang" if can.embedded else "SGLang"
    tried = "" if can.version == TRIED else f" (tried: {TRIED})"
    facts = [f"tp {can.tensor_parallel}", f"weights by {transport}"]
    facts += [f"speculative decoding ({can.speculative}: not tried)"] * bool(can.speculative) + ["routed experts"] * can.routed_experts
    facts += [f"expert parallelism {can.expert_parallel} (not tried)"] * (can.expert_parallel > 1)
    facts.append("a release frees memory" if can.memory_saver else "a release frees no memory (no --enable-memory-saver)")
    return Finding(what, "ok", f"{kind} {can.version}{tried}; " + ", ".join(facts))


async def _router(client: RouterClient) -> Finding:
    try:
        workers = await client.workers()
    except EngineError as error:
        return Finding("router", "missing", f"{error}; start it, or take out rollout.router_url")
    return Finding("router", "ok", f"{client.url}, with {len(workers)} worker(s); a run adds its engines and removes them")


def _plan(config: RunConfig) -> Finding:
    """Roles, streams and what they need together; `headrace plan` shows it."""
    try:
        plan = plan_of(config)
    except PlanError as error:
        return Finding("plan", "missing", str(error))
    return Finding("plan", "ok", "; ".join([f"{len(plan.placements)} processes (headrace plan)", *plan.warnings]))


def _python() -> Finding:
    words = f"{sys.version.split()[0]}, {sys.executable}"
    return (
        Finding("Python", "ok", words) if sys.version_info >= (3, 11) else Finding("Python", "missing", f"{words}; install 3.11 or newer")
    )


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _trainer(config: RunConfig | None) -> Finding:
    found = {package: _installed(package) for package in TRAINER_PACKAGES}
    lacking = [package for package, number in found.items() if number is None]
    if not lacking:
        return Finding("trainer", "ok", ", ".join(f"{package} {number}" for package, number in found.items()))
    words = f"{', '.join(lacking)} not installed; pip install 'headrace[trainer]'"
    return Finding("trainer", "missing" if config is not None else "absent", words)


def _gpu() -> Finding:
    if has_cuda_device():
        return Finding("GPU", "ok", "an NVIDIA driver is loaded")
    return Finding("GPU", "absent", "no NVIDIA device; everything is computed on the CPU")


def _transformer_engine() -> Finding:
    number = _installed("transformer-engine")
    if number is None:
        return Finding("TransformerEngine", "absent", "not installed; the trainer uses Megatron's own layers")
    return Finding("TransformerEngine", "ok", number)


def _sglang(config: RunConfig | None) -> Finding:
    """Of the configuration when there is one: its own check has passed by now."""
    if config is not None and config.rollout.engine == "sglang":
        return Finding("SGLang", "ok", _sglang_words(config.rollout.sglang))
    try:
        return Finding("SGLang", "ok", _sglang_words(located(SglangSpec(), Path.cwd())))
    except ValueError as error:
        return Finding("SGLang", "absent", f"{error}. The embedded engine needs none")


def _sglang_words(spec: SglangSpec) -> str:
    assert spec.python is not None
    number = version_of(spec.python)
    tested = "" if number == TRIED else f" (tried: {TRIED})"
    return f"{number}{tested} on {spec.device}, {spec.python}"


def _mooncake(config: RunConfig | None) -> Finding:
    if config is not None and config.store_kind == "mooncake":
        missing = lacking(config)
        others = f"; on {', '.join(config.hosts)} an owner is started by hand (README, Many machines)" if config.hosts else ""
        return Finding("Mooncake", "missing" if missing else "ok", "; ".join(missing) or f"{installed()}{others}")
    missing = absent()
    return Finding("Mooncake", "absent" if missing else "ok", "; ".join(missing) or installed())


def _cores(config: RunConfig | None) -> Finding:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    words = f"{cores} cores, {memory:.0f} GiB of memory"
    if config is None:
        return Finding("machine", "ok", words)
    trainer = config.trainer
    busy = trainer.tp * trainer.pp * trainer.cp * trainer.dp + config.rollout.engines
    return Finding("machine", "ok", f"{words}; {busy} ranks and engines" + (" will share them" if busy > cores else ""))


def _port(config: RunConfig | None) -> Iterator[Finding]:
    if config is None or config.service.port == 0:
        return
    host, port = config.service.host, config.service.port
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            yield Finding(
                "port", "missing", f"{host}:{port} can not be had ({error.strerror}); end what uses it, or choose another service.port"
            )
            return
    yield Finding("port", "ok", f"{host}:{port} is free")
