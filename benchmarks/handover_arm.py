"""One way to hand a batch from one process to four others, measured in an environment that has it: a part of `benchmarks.handover`.

    PYTHON benchmarks/handover_arm.py WAY MEGABYTES TIMES [DIRECTORY]

Prints one line of JSON for each time; a first time that is not printed warms everything up. Only numpy, psutil and the way's own package
are imported. A rank says when it has its arrays in hand (`ready`), then sums every byte of its rows (`read`), and the sums must agree.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

RANKS = 4
ROWS = 4096
ROW_TYPES: dict[str, np.dtype] = {
    "input_ids": np.dtype(np.int32),
    "rollout_log_probs": np.dtype(np.float32),
    "response_mask": np.dtype(np.uint8),
}
Columns = dict[str, np.ndarray]
Answer = tuple[float, float, float, int]
"""What a rank says: seconds to open, when it was ready, when it had read (both CLOCK_MONOTONIC, the same for all processes), its sum."""


class Batch:
    """Rows of lognormal length as flat columns; rank r has the rows from r · ROWS / RANKS on."""

    def __init__(self, size_bytes: int) -> None:
        random = np.random.default_rng(0)
        lengths = random.lognormal(0.0, 0.6, ROWS)
        wanted = size_bytes / sum(kind.itemsize for kind in ROW_TYPES.values())
        self.lengths = np.maximum(1, lengths * (wanted / lengths.sum())).astype(np.int64)
        tokens = int(self.lengths.sum())
        self.columns: Columns = {
            "input_ids": random.integers(0, 150_000, tokens, np.int32),
            "rollout_log_probs": -random.random(tokens, np.float32),
            "response_mask": random.integers(0, 2, tokens, np.uint8),
        }
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        self.size_bytes = sum(column.nbytes for column in self.columns.values())

    def bounds(self, rank: int) -> tuple[int, int]:
        """The rank's tokens."""
        at = ROWS // RANKS
        return int(self.offsets[rank * at]), int(self.offsets[(rank + 1) * at])

    def part(self, rank: int) -> Columns:
        first, last = self.bounds(rank)
        return {name: column[first:last] for name, column in self.columns.items()}

    def row(self, index: int) -> Columns:
        first, last = self.offsets[index], self.offsets[index + 1]
        return {name: column[first:last] for name, column in self.columns.items()}


def answered(opened: Callable[[], Columns | list[Columns]]) -> Answer:
    """Open, then read."""
    began = time.monotonic()
    got = opened()
    ready = time.monotonic()
    parts = got if isinstance(got, list) else [got]
    found = sum(checksum(columns) for columns in parts)
    return ready - began, ready, time.monotonic(), found


def checksum(columns: Columns) -> int:
    """Reads every byte once, at about the speed of memory, and does not depend on how rows are cut."""
    return int(
        columns["input_ids"].sum(dtype=np.int64)
        + columns["response_mask"].sum(dtype=np.int64)
        + columns["rollout_log_probs"].view(np.int32).sum(dtype=np.int64)
    )


# ---- processes of our own, told through pipes ----------------------------------------------------------------------------------------


class Ranks:
    """Four processes that run `work(rank, connection, facts)`."""

    def __init__(self, work: Callable[[int, Connection, Any], None], facts: Any, how: str = "spawn") -> None:
        context: Any = multiprocessing.get_context(how)
        self.connections: list[Connection] = []
        self._processes = []
        for rank in range(RANKS):
            here, there = context.Pipe()
            process = context.Process(target=work, args=(rank, there, facts), daemon=True)
            process.start()
            self.connections.append(here)
            self._processes.append(process)
        for connection in self.connections:
            assert connection.recv() == "there"

    def answers(self) -> list[Answer]:
        return [connection.recv() for connection in self.connections]

    def tell(self, message: Any) -> None:
        for connection in self.connections:
            connection.send(message)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


class Way:
    """`put` hands the batch over as far as the writer's part goes, `answers` waits for the ranks, `clear` takes it away again."""

    def __init__(self, batch: Batch, directory: Path) -> None: ...
    def put(self) -> None: ...
    def answers(self) -> list[Answer]:
        raise NotImplementedError

    def clear(self) -> None: ...
    def end(self) -> None: ...


def _memory_rank(rank: int, connection: Connection, facts: tuple[Columns, list[tuple[int, int]]]) -> None:
    shared, bounds = facts[0], facts[1][rank]
    mine = {name: column[slice(*bounds)] for name, column in shared.items()}
    checksum(mine)
    connection.send("there")
    while True:
        connection.recv()
        connection.send(answered(lambda: mine))


class Memory(Way):
    """The lower bound: one plain copy into memory that everybody has mapped and touched, and a word that it is there."""

    def __init__(self, batch: Batch, directory: Path) -> None:
        self._batch = batch
        self._shared = {}
        for name, column in batch.columns.items():
            self._shared[name] = np.frombuffer(mmap.mmap(-1, column.nbytes), column.dtype)
            self._shared[name][:] = column
        self._ranks = Ranks(_memory_rank, (self._shared, [batch.bounds(rank) for rank in range(RANKS)]), "fork")

    def put(self) -> None:
        for name, column in self._batch.columns.items():
            np.copyto(self._shared[name], column)
        self._ranks.tell("go")

    def answers(self) -> list[Answer]:
        return self._ranks.answers()

    def end(self) -> None:
        self._ranks.end()


def _pickle_rank(rank: int, connection: Connection, facts: None) -> None:
    connection.send("there")
    while True:
        connection.send(answered(connection.recv))


class Pickle(Way):
    """`multiprocessing`: each rank's columns through its pipe."""

    def __init__(self, batch: Batch, directory: Path) -> None:
        self._batch, self._ranks = batch, Ranks(_pickle_rank, None)

    def put(self) -> None:
        for rank, connection in enumerate(self._ranks.connections):
            connection.send(self._batch.part(rank))

    def answers(self) -> list[Answer]:
        return self._ranks.answers()

    def end(self) -> None:
        self._ranks.end()


# ---- Headrace's stores ---------------------------------------------------------------------------------------------------------------


def _store_rank(rank: int, connection: Connection, facts: tuple[str, list[tuple[int, int]], int]) -> None:
    from store import Ref, open_store

    location, bounds, at = facts
    there = open_store(location)

    def opened(ref: Any) -> Columns:
        return dict(there.open(ref))

    connection.send("there")
    while True:
        refs = [Ref.from_wire(wire) for wire in connection.recv()]
        if len(refs) == 1:  # the batch: open all of it, and read the rank's slice
            connection.send(answered_by(partial(opened, refs[0]), slice(*bounds[rank])))
        else:
            connection.send(answered(partial(list, map(opened, refs[rank * at : (rank + 1) * at]))))


def answered_by(opened: Callable[[], Columns], part: slice) -> Answer:
    return answered(lambda: {name: column[part] for name, column in opened().items()})


class Embedded(Way):
    """One object, whose columns are the batch's; each rank reads its slice in place."""

    whole = True

    def __init__(self, batch: Batch, directory: Path) -> None:
        from store import EmbeddedStore

        self._batch = batch
        self._store: Any = EmbeddedStore(directory / f"headrace-handover-{os.getpid()}", 3 * batch.size_bytes)
        self._refs: list[Any] = []
        self._ranks = Ranks(_store_rank, (self._store.location, [batch.bounds(rank) for rank in range(RANKS)], ROWS // RANKS))

    def put(self) -> None:
        if self.whole:
            self._refs = [self._store.put("batch", self._batch.columns)]
        else:
            self._refs = [self._store.put(f"row-{index}", self._batch.row(index)) for index in range(ROWS)]
        self._ranks.tell([ref.to_wire() for ref in self._refs])

    def answers(self) -> list[Answer]:
        return self._ranks.answers()

    def clear(self) -> None:
        self._store.free(self._refs)

    def end(self) -> None:
        self._ranks.end()
        self._store.remove()


class EmbeddedRows(Embedded):
    """One object a row, as a run has them."""

    whole = False


class OverMooncake(Way):
    """Headrace's store over Mooncake, an object a rank; the owner of this host's memory is a process of its own."""

    def __init__(self, batch: Batch, directory: Path) -> None:
        from store import MooncakeStore, mooncake_location

        self._batch = batch
        port, http_port, health = _free_ports(3)
        location = mooncake_location("127.0.0.1", port, "handover", http_port)
        argv = [sys.executable, "-P", "-m", "store.mooncake_owner", "--location", location, "--port", str(health)]
        self._owner = subprocess.Popen([*argv, "--capacity-bytes", str(3 * batch.size_bytes), "--master"], stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60.0
        while not _answers(f"http://127.0.0.1:{health}/health"):
            if self._owner.poll() is not None or time.monotonic() > until:
                raise RuntimeError("the owner of this host's memory did not come up")
            time.sleep(0.1)
        self._store = MooncakeStore(location)
        self._refs: list[Any] = []
        self._ranks = Ranks(_store_rank, (location, [], 1))

    def put(self) -> None:
        self._refs = [self._store.put(f"part-{rank}", self._batch.part(rank)) for rank in range(RANKS)]
        self._ranks.tell([ref.to_wire() for ref in self._refs])

    def answers(self) -> list[Answer]:
        return self._ranks.answers()

    def clear(self) -> None:
        self._store.free(self._refs)
        while self._store.stats().used_bytes:  # until the leases of what was read have run out
            time.sleep(0.1)

    def end(self) -> None:
        self._ranks.end()
        self._owner.terminate()
        self._owner.wait()


# ---- what others use ---------------------------------------------------------------------------------------------------------------


def _ray() -> Any:
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_raylet_start_wait_time_s="300", RAY_worker_niceness=str(os.nice(0)))
    import ray

    ray.init(include_dashboard=False, num_cpus=RANKS + 4, object_store_memory=2 << 30, log_to_driver=False, logging_level="ERROR")
    return ray


class Ray(Way):
    """Its object store: the batch is put once, and each rank reads its slice in place."""

    def __init__(self, batch: Batch, directory: Path) -> None:
        self._batch, self._ray = batch, _ray()

        class Rank:
            def read(self, boxed: list[Any], first: int, last: int) -> Answer:
                import ray

                return answered_by(lambda: ray.get(boxed[0]), slice(first, last))

        actor = self._ray.remote(num_cpus=1)(Rank)
        self._ranks = [actor.remote() for _ in range(RANKS)]
        self._ref: Any = None
        self._asked: list[Any] = []

    def put(self) -> None:
        self._ref = self._ray.put(self._batch.columns)
        self._asked = [rank.read.remote([self._ref], *self._batch.bounds(index)) for index, rank in enumerate(self._ranks)]

    def answers(self) -> list[Answer]:
        answers: list[Answer] = self._ray.get(self._asked)
        return answers

    def clear(self) -> None:
        self._ref, self._asked = None, []

    def end(self) -> None:
        self._ray.shutdown()


class TransferQueue(Way):
    """Its key-value interface as its readers use it: a TensorDict of ragged columns, a key for each row."""

    def __init__(self, batch: Batch, directory: Path) -> None:
        self._batch, self._ray = batch, _ray()
        import torch
        import transfer_queue as queue
        from tensordict import TensorDict

        self._queue = queue
        queue.init()
        offsets = torch.from_numpy(batch.offsets)
        fields = {name: torch.nested.nested_tensor_from_jagged(torch.from_numpy(c), offsets) for name, c in batch.columns.items()}
        self._fields = TensorDict(fields, batch_size=ROWS)
        self._keys = [f"row-{index}" for index in range(ROWS)]

        class Rank:
            def read(self, keys: list[str]) -> Answer:
                import transfer_queue as queue

                def opened() -> list[Columns]:
                    got = queue.kv_batch_get(keys=keys, partition_id="train")
                    values = {name: got[name] for name in ROW_TYPES}
                    return [{name: (v.values() if v.is_nested else v.reshape(-1)).numpy() for name, v in values.items()}]

                return answered(opened)

        actor = self._ray.remote(num_cpus=1)(Rank)
        self._ranks = [actor.remote() for _ in range(RANKS)]
        self._asked: list[Any] = []

    def put(self) -> None:
        self._queue.kv_batch_put(keys=self._keys, partition_id="train", fields=self._fields)
        at = ROWS // RANKS
        self._asked = [rank.read.remote(self._keys[index * at : (index + 1) * at]) for index, rank in enumerate(self._ranks)]

    def answers(self) -> list[Answer]:
        answers: list[Answer] = self._ray.get(self._asked)
        return answers

    def clear(self) -> None:
        self._queue.kv_clear(keys=self._keys, partition_id="train")

    def end(self) -> None:
        self._queue.close()
        self._ray.shutdown()


def _mooncake_client(port: int, segment_bytes: int, buffer_bytes: int) -> Any:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, buffer_bytes, "tcp", "", f"127.0.0.1:{port}")
    if code != 0:
        raise RuntimeError(f"Mooncake's setup returned {code}")
    return store


def _mooncake_rank(rank: int, connection: Connection, facts: tuple[int, int]) -> None:
    port, buffer_bytes = facts
    store = _mooncake_client(port, 0, buffer_bytes)

    def opened() -> Columns:
        return {name: np.frombuffer(store.get(f"{rank}/{name}"), kind) for name, kind in ROW_TYPES.items()}

    connection.send("there")
    while True:
        connection.recv()
        connection.send(answered(opened))


class Mooncake(Way):
    """`put` and `get` of bytes, a key for each rank and column; the segment is the writer's."""

    def __init__(self, batch: Batch, directory: Path) -> None:
        self._batch = batch
        ports = _free_ports(2)
        master = Path(sys.executable).with_name("mooncake_master")
        argv = [str(master), "--rpc_address=127.0.0.1", f"--rpc_port={ports[0]}", "--metrics_host=127.0.0.1", f"--metrics_port={ports[1]}"]
        self._master = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _until_listening(ports[0])
        self._store = _mooncake_client(ports[0], 2 * batch.size_bytes, batch.size_bytes)
        self._ranks = Ranks(_mooncake_rank, (ports[0], batch.size_bytes))

    def put(self) -> None:
        for rank in range(RANKS):
            for name, column in self._batch.part(rank).items():
                code = self._store.put(f"{rank}/{name}", column.tobytes())
                assert code == 0, f"put returned {code}"
        self._ranks.tell("go")

    def answers(self) -> list[Answer]:
        return self._ranks.answers()

    def clear(self) -> None:
        for rank in range(RANKS):
            for name in ROW_TYPES:
                assert self._store.remove(f"{rank}/{name}", True) == 0

    def end(self) -> None:
        self._ranks.end()
        self._store.close()
        self._master.terminate()
        self._master.wait()


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=2.0).close()
    except OSError:
        return False
    return True


def _until_listening(port: int) -> None:
    give_up = time.monotonic() + 60.0
    while time.monotonic() < give_up:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("mooncake_master did not come up")


WAYS: dict[str, type[Way]] = {
    "memory": Memory,
    "embedded": Embedded,
    "embedded-rows": EmbeddedRows,
    "over-mooncake": OverMooncake,
    "pickle": Pickle,
    "ray": Ray,
    "transferqueue": TransferQueue,
    "mooncake": Mooncake,
}


def cpu_seconds() -> float:
    """Of this process and all that it has started, directly or not."""
    seconds = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = process.cpu_times()
            seconds += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return seconds


def main(name: str, megabytes: str, times: str, directory: str = "/dev/shm") -> None:
    batch = Batch(int(megabytes) * 1_000_000)
    elsewhere = {key: np.ones_like(column) for key, column in batch.columns.items()}
    expected = [checksum(batch.part(rank)) for rank in range(RANKS)]
    way = WAYS[name](batch, Path(directory))
    try:
        for turn in range(1 + int(times)):
            began = time.monotonic()
            for key, column in batch.columns.items():
                np.copyto(elsewhere[key], column)
            copied = time.monotonic() - began
            cpu, began = cpu_seconds(), time.monotonic()
            way.put()
            put = time.monotonic() - began
            answers = way.answers()
            cpu = cpu_seconds() - cpu
            found = [answer[3] for answer in answers]
            assert found == expected, f"the sums are {found}, not {expected}"
            way.clear()
            facts = {
                "bytes": batch.size_bytes,
                "copy_s": copied,
                "put_s": put,
                "open_s": max(answer[0] for answer in answers),
                "ready_s": max(answer[1] for answer in answers) - began,
                "read_s": max(answer[2] for answer in answers) - began,
                "cpu_s": cpu,
            }
            if turn:
                print(json.dumps(facts), flush=True)
    finally:
        way.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
