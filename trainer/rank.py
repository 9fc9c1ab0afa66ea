"""One rank: the same program on each. Rank 0 takes commands over HTTP and passes them to all; all do them together.

Started by `trainer.main` (forked, warm), or by hand under torchrun's environment variables: `torchrun … -m trainer.rank --spec FILE`.

An error that every rank agrees on (`Refused`) is the command's answer. Any other ends the rank, and with it the group: a rank that cannot
say where the others are must not go on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import queue
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from trainer import device
from trainer.spec import TrainerSpec


def _spec_by_hand() -> TrainerSpec:
    parser = argparse.ArgumentParser(description="One rank of the trainer, with torchrun's environment variables.")
    parser.add_argument("--spec", type=Path, required=True)
    return TrainerSpec.read(parser.parse_args().spec)


if __name__ == "__main__":
    # The parent settles the device before it imports this; by hand, it is settled here, before Megatron comes in.
    try:
        spec_by_hand = _spec_by_hand()
        device.install(device.choose(spec_by_hand), spec_by_hand.tp)
    except ValueError as error:
        sys.exit(f"trainer: {error}")

from trainer import saving  # noqa: E402
from trainer.export import write_buckets  # noqa: E402
from trainer.group import Group, Refused, Spoiled  # noqa: E402
from trainer.loss import Policy  # noqa: E402
from trainer.memory import Peaks  # noqa: E402
from trainer.model import Model  # noqa: E402
from trainer.models import begin, parts, policy_loss, resume  # noqa: E402
from trainer.server import Command, Desk, Refusal, Server, build_app, listen  # noqa: E402
from trainer.step import Stepper  # noqa: E402
from trainer.wire import (  # noqa: E402
    REQUESTS,
    Canary,
    Loaded,
    LoadRequest,
    Logprobs,
    LogprobsRequest,
    ResumeRequest,
    Saved,
    SaveRequest,
    Snapshot,
    SnapshotRequest,
    Stopped,
    StopRequest,
    TrainReport,
    TrainRequest,
)

STOP_S = 5.0


class Rank:
    """The commands, each called on all ranks with the same body. What it returns is rank 0's answer."""

    def __init__(self, spec: TrainerSpec, group: Group, desk: Desk) -> None:
        self._spec, self._group, self._desk = spec, group, desk
        self._model: Model | None = None
        self._policy: Policy | None = None
        self._peaks = Peaks()
        self._epoch = 0
        self._last: tuple[str, TrainReport] | None = None
        self.stopping = False
        self._calls: dict[str, Callable[[Any], BaseModel]] = {
            "load": self.load,
            "resume": self.resume,
            "train": self.train,
            "logprobs": self.logprobs,
            "snapshot": self.snapshot,
            "save": self.save,
            "stop": self.stop,
        }

    def do(self, name: str, body: Any) -> BaseModel:
        """Ends with all ranks agreeing that it is done, so that none waits for the next command while another is still at work."""
        self._desk.advanced()
        reply = self._calls[name](body)
        self._group.agree()
        return reply

    def load(self, request: LoadRequest) -> Loaded:
        with self._peaks.phase("load"):
            model = begin(self._spec, self._group, Path(request.model_path or self._spec.model_path))
        self._take(model, 0, 0)
        return Loaded(trained_version=0)

    def resume(self, request: ResumeRequest) -> Loaded:
        with self._peaks.phase("load"):
            model, checkpoint = resume(self._spec, self._group, Path(request.path))
        self._take(model, checkpoint.trained_version, checkpoint.meta.epoch)
        return Loaded(trained_version=checkpoint.trained_version)

    def train(self, request: TrainRequest) -> TrainReport:
        self._loaded()
        version = self._desk.trained_version
        digest = hashlib.sha256(request.model_dump_json().encode()).hexdigest()
        if self._last is not None and request.batch_id == version - 1 and self._last[0] == digest:
            return self._last[1]
        if request.batch_id != version:
            again = " with another plan than the one that was trained" if self._last and request.batch_id == version - 1 else ""
            raise Refused(409, f"batch {request.batch_id} came{again}, but this trainer has trained {version} batches and wants {version}")
        try:
            report = self._stepper().train(request)
        except Spoiled:
            self._model, self._desk.loaded = None, False  # nothing may be saved, pushed or trained from here
            raise
        self._epoch = request.epoch
        self._desk.trained_version = report.trained_version
        self._last = (digest, report)
        if self._group.rank == 0:
            self._account(request, report)
        return report

    def logprobs(self, request: LogprobsRequest) -> Logprobs:
        return Logprobs(log_probs=self._stepper().log_probs(request.rows))

    def snapshot(self, request: SnapshotRequest) -> Snapshot:
        model = self._loaded()
        if request.version != self._desk.trained_version:
            raise Refused(409, f"the weights here are version {self._desk.trained_version}, not {request.version}")
        if any(not 0 <= token < model.hf_config.vocab_size for token in request.canary_ids):
            raise Refused(422, f"canary_ids has a token outside the vocabulary of {model.hf_config.vocab_size}")
        prefix = f"{self._spec.run_id}/weights/{request.epoch}/{request.version}"
        with self._peaks.phase("export"):
            buckets, tensors = write_buckets(model, self._group, self._spec.store_location, prefix, request.bucket_bytes)
        log_probs = self._stepper().sequence_log_probs(request.canary_ids) if request.canary_ids else []
        return Snapshot(buckets=buckets, tensors=tensors, canary=Canary(input_ids=request.canary_ids, log_probs=log_probs))

    def save(self, request: SaveRequest) -> Saved:
        version = self._desk.trained_version
        directory = Path(request.directory)
        models = parts(self._loaded())
        with self._peaks.phase("export"):
            path = saving.save(self._spec, self._group, models, directory, version, self._epoch, request.keep_last)
        return Saved(path=str(path), trained_version=version)

    def stop(self, request: StopRequest) -> Stopped:
        self.stopping = True
        return Stopped()

    def _stepper(self) -> Stepper:
        model = self._loaded()
        assert self._policy is not None
        return Stepper(self._spec, self._group, model, self._policy, self._desk.advanced, self._peaks)

    def _loaded(self) -> Model:
        if self._model is None:
            raise Refused(409, "no weights are loaded: POST /v1/load or /v1/resume first")
        return self._model

    def _take(self, model: Model, trained_version: int, epoch: int) -> None:
        self._policy = policy_loss(self._spec, self._group)
        self._model, self._epoch, self._last = model, epoch, None
        self._desk.trained_version, self._desk.loaded = trained_version, True

    def _account(self, request: TrainRequest, report: TrainReport) -> None:
        """The trainer's own account of what was trained, on the disk before the driver hears of it."""
        line = {
            "batch_id": report.batch_id,
            "epoch": request.epoch,
            "row_ids": report.row_ids,
            "skipped": report.skipped,
            "skipped_row_ids": report.skipped_row_ids,
        }
        self._spec.run_dir.mkdir(parents=True, exist_ok=True)
        with (self._spec.run_dir / "trained_rows.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def lead(spec: TrainerSpec, group: Group, rank: Rank, desk: Desk, listener: socket.socket) -> None:
    """Rank 0. Consumes commands from HTTP; when none comes, says that it lives; ends after `stop`."""
    server = Server(build_app(desk, spec.token), listener)
    server.start()
    while not rank.stopping:
        try:
            command = desk.commands.get(timeout=spec.control_timeout_s / 5)
        except queue.Empty:
            group.send(None)
            continue
        # False when the caller went away while the command stood in line; once it runs, nothing can cancel it.
        if command.answer.set_running_or_notify_cancel():
            desk.busy = True
            _lead_one(group, rank, desk, command)
    server.stop(STOP_S)


def _lead_one(group: Group, rank: Rank, desk: Desk, command: Command) -> None:
    group.send({"name": command.name, "body": command.body.model_dump(mode="json")})
    try:
        reply = rank.do(command.name, command.body)
    except Refused as refused:
        desk.busy = False
        command.answer.set_exception(Refusal(refused.status, refused.message))
    else:
        desk.busy = False
        command.answer.set_result(reply)


def follow(group: Group, rank: Rank) -> None:
    """The other ranks. Consumes what rank 0 sends; ends after `stop`, or with an error when rank 0 falls silent."""
    while not rank.stopping:
        command = group.receive()
        if command is None:
            continue
        try:
            rank.do(command["name"], REQUESTS[command["name"]].model_validate(command["body"]))
        except Refused:
            continue  # rank 0 answers for all


def run(spec: TrainerSpec, incarnation: int, listener: socket.socket | None = None, rendezvous_fd: int | None = None) -> None:
    """The whole life of a rank. Rank 0 listens on `listener`, or opens its own."""
    torch.set_num_threads(spec.threads_per_rank)
    computing_on = device.enter()
    started = time.perf_counter()
    group = Group(spec, rendezvous_fd)
    desk = Desk(incarnation=incarnation, world_size=group.size)
    rank = Rank(spec, group, desk)
    if group.rank == 0:
        listener = listener or listen(spec.host, spec.port)
        port = listener.getsockname()[1]
        print(
            f"trainer: {group.size} rank{'s' if group.size > 1 else ''} up on {computing_on.type} in "
            f"{time.perf_counter() - started:.2f} s, incarnation {incarnation}, "
            f"port {port}",
            flush=True,
        )
        lead(spec, group, rank, desk, listener)
    else:
        follow(group, rank)


if __name__ == "__main__":
    try:
        run(spec_by_hand, spec_by_hand.incarnation + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    except ValueError as error:
        sys.exit(f"trainer: {error}")
