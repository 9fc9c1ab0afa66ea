"""A trainer without a model, for benchmarks of the rest: it speaks the trainer's HTTP API and takes `--tau` seconds for every batch.

    python -P -m benchmarks.scripted_trainer --spec FILE --tau 4.0

Weights are those of the base checkpoint in every version, put into the store anew for each, so that pushes carry their bytes. It opens the
rows of a batch and keeps their leases until it has taken its time; its account of what it trained is written and synced like the real
one's. No torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import numpy as np
from pydantic import BaseModel
from safetensors.numpy import load_file

from rollout.engine.settings import PACED_LOG_PROB
from store import Exists, Lease, Ref, StoreError, open_ref, open_store
from trainer import wire
from trainer.server import Command, Desk, Refusal, Server, build_app, listen
from trainer.spec import TrainerSpec


class ScriptedTrainer:
    def __init__(self, spec: TrainerSpec, tau_s: float, desk: Desk) -> None:
        self._spec = spec
        self._tau_s = tau_s
        self._desk = desk
        self._weights: dict[str, np.ndarray] = {}
        self._facts: dict[str, wire.TensorFacts] = {}
        self._reports: dict[int, wire.TrainReport] = {}

    def answer(self, command: Command) -> BaseModel:
        return getattr(self, f"_{command.name}")(command.body)

    def _load(self, request: wire.LoadRequest) -> wire.Loaded:
        path = Path(request.model_path) if request.model_path else self._spec.model_path
        self._weights = {name: array for file in sorted(path.glob("*.safetensors")) for name, array in load_file(file).items()}
        self._facts = {
            name: wire.TensorFacts(shape=list(array.shape), dtype=str(array.dtype), sha256=hashlib.sha256(array.tobytes()).hexdigest())
            for name, array in self._weights.items()
        }
        self._desk.loaded, self._desk.trained_version = True, 0
        return wire.Loaded(trained_version=0)

    def _resume(self, request: wire.ResumeRequest) -> wire.Loaded:
        meta = json.loads((Path(request.path) / "meta.json").read_text())
        self._load(wire.LoadRequest())
        self._desk.trained_version = meta["trained_version"]
        return wire.Loaded(trained_version=meta["trained_version"])

    def _train(self, request: wire.TrainRequest) -> wire.TrainReport:
        began = time.monotonic()
        if request.batch_id != self._desk.trained_version:
            if request.batch_id in self._reports:
                return self._reports[request.batch_id]
            raise Refusal(409, f"batch {request.batch_id} is not the next: this trainer holds version {self._desk.trained_version}")
        rows = [row for mini in request.mini_batches for row in mini.rows()]
        leases = self._open(rows)
        line = {"batch_id": request.batch_id, "epoch": request.epoch, "row_ids": [row.row_id for row in rows], "skipped": None}
        with (self._spec.run_dir / "trained_rows.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        time.sleep(max(0.0, self._tau_s - (time.monotonic() - began)))
        leases.clear()
        self._desk.trained_version += 1
        self._desk.advanced()
        report = wire.TrainReport(
            batch_id=request.batch_id,
            trained_version=self._desk.trained_version,
            skipped=None,
            row_ids=[row.row_id for row in rows],
            skipped_row_ids=[],
            rows=len(rows),
            tokens=sum(row.length for row in rows),
            loss=0.0,
            grad_norm=0.0,
            clip_fraction=0.0,
            entropy=0.0,
            kl=0.0,
            ratio_max=1.0,
            logprob_gap_max=None,
            logprob_gap_rows=0,
            read_s=0.0,
            forward_backward_s=self._tau_s,
            optimizer_s=0.0,
            step_s=time.monotonic() - began,
            memory_bytes={},
            memory_phase=None,
        )
        self._reports = {request.batch_id: report}
        return report

    def _open(self, rows: list[wire.PlanRow]) -> list[Lease]:
        """Of all of them, with what the plan says of each checked."""
        try:
            leases = [open_ref(row.rollout.ref()) for row in rows]
        except StoreError as error:
            raise Refusal(410, str(error)) from error
        for row, lease in zip(rows, leases, strict=True):
            if len(lease["input_ids"]) != row.length or not np.isfinite(lease["rollout_log_probs"]).all():
                raise Refusal(422, f"row {row.row_id} is not what the plan says")
        return leases

    def _snapshot(self, request: wire.SnapshotRequest) -> wire.Snapshot:
        key = f"{self._spec.run_id}/weights/{request.epoch}/{request.version}/0"
        store = open_store(self._spec.store_location)
        try:
            ref = store.put(key, self._weights)
        except Exists:
            store.free([Ref(key, 0, self._spec.store_location)])
            ref = store.put(key, self._weights)
        canary = wire.Canary(input_ids=request.canary_ids, log_probs=[PACED_LOG_PROB] * max(0, len(request.canary_ids) - 1))
        return wire.Snapshot(buckets=[wire.WireRef.of(ref)], tensors=self._facts, canary=canary)

    def _save(self, request: wire.SaveRequest) -> wire.Saved:
        """A directory that the driver takes for a checkpoint: the version, and no weights."""
        version = self._desk.trained_version
        path = Path(request.directory) / f"step_{version:08d}"
        path.mkdir(parents=True, exist_ok=True)
        meta = {"trained_version": version, "epoch": 0, "batch_id": version - 1 if version else None, "layout": {"dp": 1}, "files": {}}
        (path / "meta.json").write_text(json.dumps(meta | {"torch": "none", "megatron": "none"}))
        return wire.Saved(path=str(path), trained_version=version)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--tau", type=float, required=True, help="seconds a batch")
    options = parser.parse_args()
    spec = TrainerSpec.model_validate_json(options.spec.read_bytes())
    desk = Desk(spec.incarnation, 1)
    trainer = ScriptedTrainer(spec, options.tau, desk)
    server = Server(build_app(desk, spec.token), listen(spec.host, spec.port))
    server.start()
    while True:
        command = desk.commands.get()  # ends with the process: the launcher sees to it
        if command.name == "stop":
            command.answer.set_result(wire.Stopped())
            break
        desk.busy = True
        try:
            reply = trainer.answer(command)
        except Refusal as refusal:
            command.answer.set_exception(refusal)
        except Exception as error:  # the caller's to see; the next command may go well
            command.answer.set_exception(Refusal(500, f"{type(error).__name__}: {error}"))
        else:
            command.answer.set_result(reply)
        finally:
            desk.busy = False
    server.stop(5.0)


if __name__ == "__main__":
    main()
