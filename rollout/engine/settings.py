"""The engine's flags, as facts. SGLang's names wherever SGLang has the flag; importing this costs nothing (no torch)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# What SGLang 0.5.23 does when deterministic inference is on and a request names no seed.
DEFAULT_SEED = 42
MAX_THREADS = 256
PACED_LOG_PROB = -1.0  # of every token of a prompt, with --paced-pushes


@dataclass(frozen=True, slots=True)
class Settings:
    """One engine's configuration. `max_total_tokens` None means: every running request may fill the context."""

    model_path: Path
    host: str = "127.0.0.1"
    port: int = 30000
    max_running_requests: int = 128
    context_length: int | None = None
    max_total_tokens: int | None = None
    max_queued_requests: int | None = None
    weight_version: str = "default"
    api_key: str | None = None
    admin_api_key: str | None = None
    stream_interval: int = 1
    incremental_streaming_output: bool = False
    skip_tokenizer_init: bool = False
    random_seed: int = 0
    deterministic: bool = False
    threads: int = 1
    dtype: str = "float32"
    log_level: str = "info"
    paced: float | None = None
    paced_lengths: Path | None = None
    paced_pushes: bool = False
    paced_apart: bool = False
    slow_step: float = 0.0
    faults: Path | None = None
    allow_faults: bool = False
    enable_return_routed_experts: bool = False


def parse_flags(arguments: list[str]) -> Settings:
    """Flags to Settings. Ends the process with code 2 and one sentence for a flag that cannot be (argparse's own way)."""
    parser = argparse.ArgumentParser(
        prog="python -m rollout.engine",
        description="The embedded engine: SGLang's HTTP API over a small model on the CPU.",
        allow_abbrev=False,
    )
    default = Settings(model_path=Path())
    parser.add_argument("--model-path", type=Path, required=True, help="a Hugging Face checkpoint directory (config.json and safetensors)")
    parser.add_argument("--host", default=default.host)
    parser.add_argument("--port", type=_count(0, 65535), default=default.port, help="0 takes any free port and logs it")
    parser.add_argument("--max-running-requests", type=_count(1), default=default.max_running_requests)
    parser.add_argument("--context-length", type=_count(8), help="default: the model's max_position_embeddings")
    parser.add_argument("--max-total-tokens", type=_count(8), help="prompt and new tokens of all running requests together")
    parser.add_argument("--max-queued-requests", type=_count(0), help="more waiting requests than this are refused with 503")
    parser.add_argument("--weight-version", default=default.weight_version)
    parser.add_argument("--api-key")
    parser.add_argument("--admin-api-key")
    parser.add_argument(
        "--stream-interval", type=_count(1), default=default.stream_interval, help="tokens a streamed chunk brings, at least"
    )
    parser.add_argument("--incremental-streaming-output", action="store_true", help="chunks carry what is new instead of everything so far")
    parser.add_argument("--skip-tokenizer-init", action="store_true", help="token ids only: no text in, none out, no stop strings")
    parser.add_argument("--random-seed", type=int, default=default.random_seed)
    parser.add_argument(
        "--deterministic",
        "--enable-deterministic-inference",
        dest="deterministic",
        action="store_true",
        help="each request is computed alone, so its tokens depend on nothing but itself",
    )
    parser.add_argument(
        "--enable-return-routed-experts", action="store_true", help="a request may ask where its tokens went, of a model with experts"
    )
    parser.add_argument("--threads", type=_count(1, MAX_THREADS), default=default.threads, help="torch threads")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=default.dtype)
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default=default.log_level)
    parser.add_argument(
        "--paced",
        type=_rate,
        metavar="TOKENS_PER_S",
        help="for benchmarks of clients: compute nothing, and give every request made-up tokens at this rate (rollout/engine/paced.py)",
    )
    parser.add_argument(
        "--paced-lengths",
        type=Path,
        metavar="FILE",
        help="with --paced: answers end after so many tokens, drawn from these lines by --random-seed (max_new_tokens at most)",
    )
    parser.add_argument(
        "--paced-pushes",
        action="store_true",
        help=f"with --paced: weights are taken and compared like any engine's, and every prompt token has the log-prob {PACED_LOG_PROB:g}",
    )
    parser.add_argument(
        "--paced-apart",
        action="store_true",
        help="with --paced: a request's chunks come in steps of its own, as a real server's do, and not all requests' in the same one",
    )
    parser.add_argument(
        "--slow-step", type=_seconds, default=default.slow_step, metavar="SECONDS", help="for tests and benchmarks: sleep in every step"
    )
    parser.add_argument("--faults", type=Path, metavar="FILE", help="for tests: fail as this JSON script says (rollout/engine/faults.py)")
    parser.add_argument("--allow-faults", action="store_true", help="for tests: POST /faults replaces the script of a running engine")
    settings = Settings(**vars(parser.parse_args(arguments)))
    if settings.paced is None and (settings.paced_lengths is not None or settings.paced_pushes or settings.paced_apart):
        parser.error("--paced-lengths, --paced-pushes and --paced-apart are for an engine that runs with --paced TOKENS_PER_S")
    return settings


def _rate(text: str) -> float:
    value = float(text)
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of tokens a second; it must be above 0")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds; it must be 0 or more")
    return value


def _count(least: int, most: int | None = None) -> Callable[[str], int]:
    def whole(text: str) -> int:
        value = int(text)
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{value} is out of range; it must be {least} or more" + (f", at most {most}" if most else ""))
        return value

    return whole
