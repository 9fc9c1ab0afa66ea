"""The warm parent: imports torch and Megatron once, forks the ranks, and forks them anew when one dies.

    trainer.main ──fork──▶ rank 0 (HTTP), rank 1, …        one group, one incarnation
         ▲                        │ one dies: the others are killed at once, incarnation + 1,
         └────────SIGCHLD─────────┘ and a new, empty group is forked, waiting for load or resume

A fresh import costs seconds, a fork some hundredths of one. The parent never computes and has no threads, so that a fork of it is sound.
Its HTTP socket outlives the groups: a caller that comes in between waits instead of being refused. It sleeps in `sigwait`; nothing is
polled. Ranks die with it (PR_SET_PDEATHSIG), and it dies with the process named in HEADRACE_PARENT_PID.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from trainer.server import listen
from trainer.spec import TrainerSpec

_PR_SET_PDEATHSIG = 1
_WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}
STOP_S = 10.0
UNUSABLE, GAVE_UP = 2, 3


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL for this process when its parent ends; at once when it already has."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


class Parent:
    def __init__(self, spec: TrainerSpec, listener: socket.socket) -> None:
        self._spec = spec
        self._listener = listener
        self._incarnation = spec.incarnation
        self._ranks: dict[int, int] = {}
        """pid -> rank, of those alive"""

    def run(self) -> int:
        """Until the group ends by itself (`/v1/stop`), or is told to (SIGTERM), or dies too often. The exit code."""
        quick_deaths = 0
        while True:
            forked = time.monotonic()
            self._fork_group()
            ending = self._watch()
            if ending is None:
                return 0
            lived_s = time.monotonic() - forked
            quick_deaths = quick_deaths + 1 if lived_s < self._spec.quick_death_s else 1
            if quick_deaths >= self._spec.max_quick_deaths:
                print(
                    f"trainer: gave up: {ending}, the {quick_deaths}th death in a row within {self._spec.quick_death_s:g} s of a start. "
                    "The first error above says why; free memory, or correct the spec, and start again",
                    flush=True,
                )
                return GAVE_UP
            self._incarnation += 1
            print(f"trainer: {ending} after {lived_s:.1f} s; forking incarnation {self._incarnation}", flush=True)

    def _fork_group(self) -> None:
        rendezvous = socket.create_server(("127.0.0.1", 0))
        parent_pid = os.getpid()
        for rank in range(self._spec.world_size):
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                self._become(rank, parent_pid, rendezvous)
            self._ranks[pid] = rank
        rendezvous.close()

    def _become(self, rank: int, parent_pid: int, rendezvous: socket.socket) -> NoReturn:
        """In the child. Never returns into the parent's code."""
        code = 1
        try:
            die_with_parent(parent_pid)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
            names = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": self._spec.world_size,
                "LOCAL_WORLD_SIZE": self._spec.world_size,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": rendezvous.getsockname()[1],
            }
            os.environ.update({name: str(value) for name, value in names.items()})
            from trainer import rank as program

            if rank != 0:
                rendezvous.close()
                self._listener.close()
            fd = rendezvous.detach() if rank == 0 else -1
            program.run(self._spec, self._incarnation, self._listener if rank == 0 else None, fd)
            code = 0
        except BaseException:
            print(f"trainer: rank {rank} died of", flush=True)
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _watch(self) -> str | None:
        """Waits for a signal. None when the group has ended as it should; else what killed it, with all its ranks gone."""
        while self._ranks:
            if signal.sigwait(_WATCHED) != signal.SIGCHLD:
                self._kill()
                return None
            for pid, status in self._reap():
                rank = self._ranks.pop(pid)
                code = os.waitstatus_to_exitcode(status)
                if code != 0:
                    self._kill()
                    return f"rank {rank} " + (f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}")
                self._end_of_group()
        return None

    def _reap(self) -> list[tuple[int, int]]:
        """Children that have ended. Several may share one SIGCHLD."""
        ended: list[tuple[int, int]] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            if pid in self._ranks:
                ended.append((pid, status))

    def _end_of_group(self) -> None:
        """One rank ended well: the others follow, or are killed after a deadline."""
        deadline = time.monotonic() + STOP_S
        while self._ranks and (left_s := deadline - time.monotonic()) > 0:
            signal.sigtimedwait({signal.SIGCHLD}, left_s)
            for pid, _ in self._reap():
                self._ranks.pop(pid, None)
        self._kill()

    def _kill(self) -> None:
        for pid in self._ranks:
            os.kill(pid, signal.SIGKILL)
        for pid in self._ranks:
            os.waitpid(pid, 0)
        self._ranks.clear()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The trainer: forks one process per rank and serves HTTP from rank 0.")
    parser.add_argument("--spec", type=Path, required=True)
    path = parser.parse_args(arguments).spec
    if "HEADRACE_PARENT_PID" in os.environ:
        die_with_parent(int(os.environ["HEADRACE_PARENT_PID"]))
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    try:
        spec = TrainerSpec.read(path)
        listener = listen(spec.host, spec.port)
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ[name] = str(spec.threads_per_rank)
        from trainer import device  # after the environment, for it imports torch

        chosen = device.choose(spec)
    except ValueError as error:
        print(f"trainer: {error}", flush=True)
        return UNUSABLE
    device.install(chosen, spec.tp)
    from trainer import rank  # noqa: F401  (this import is what makes the parent warm)

    device.untouched()
    spec.run_dir.mkdir(parents=True, exist_ok=True)
    facts = spec.run_dir / "trainer.json"
    facts.with_suffix(".partial").write_text(json.dumps({"pid": os.getpid(), "port": listener.getsockname()[1]}))
    facts.with_suffix(".partial").replace(facts)
    return Parent(spec, listener).run()


if __name__ == "__main__":
    sys.exit(main())
