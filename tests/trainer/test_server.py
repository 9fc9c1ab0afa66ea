"""Trainers as the driver meets them: real processes, real HTTP, through the client."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from store import EmbeddedStore, TensorForm
from store.pieces import bundles, whole_tensors
from trainer.client import TrainerClient, TrainerLost, TrainerRefused
from trainer.spec import TrainerSpec
from trainer.wire import MiniBatch, Snapshot

ROOT = Path(__file__).parents[2]
MakeSpec = Callable[..., TrainerSpec]


def halves(rows: list[Any]) -> list[MiniBatch]:
    """For two ranks, two micro-batches each."""
    half = len(rows) // 2
    return [MiniBatch(ranks=[[rows[:half][:2], rows[:half][2:]], [rows[half:][:2], rows[half:][2:]]])]


def weights(snapshot: Snapshot) -> dict[str, np.ndarray]:
    forms = {name: TensorForm(facts.dtype, tuple(facts.shape)) for name, facts in snapshot.tensors.items()}
    found = bundles([bucket.ref() for bucket in snapshot.buckets], forms)
    return {name: array.copy() for bundle in found for name, _, array in whole_tensors(bundle)}


async def test_a_batch_is_trained_pushed_and_accounted_for(start: Any, rows: Any, store: EmbeddedStore) -> None:
    async with start(dp=2) as trainer:
        client = trainer.client
        health = await client.health()
        assert (health.state, health.world_size, health.incarnation, health.trained_version) == ("empty", 2, 0, 0)
        assert (await client.load()).trained_version == 0
        drawn = rows.ragged(30, 8)
        before = (await client.health()).progress
        report = await client.train(0, epoch=3, lr=1e-2, mini_batches=halves(drawn))
        assert report.trained_version == 1 and report.skipped is None and report.rows == 8
        assert sorted(report.row_ids) == sorted(row.row_id for row in drawn)
        assert (await client.health()).progress >= before + 3  # the command and rank 0's two micro-batches
        lines = [json.loads(line) for line in (trainer.spec.run_dir / "trained_rows.jsonl").read_text().splitlines()]
        assert [(line["batch_id"], line["epoch"], line["skipped"]) for line in lines] == [(0, 3, None)]
        assert lines[0]["row_ids"] == report.row_ids

        assert await client.train(0, epoch=3, lr=1e-2, mini_batches=halves(drawn)) == report, "the same batch again: the stored report"
        assert len((trainer.spec.run_dir / "trained_rows.jsonl").read_text().splitlines()) == 1
        for batch_id, lr, words in ((0, 2e-2, "another plan"), (5, 1e-2, "wants 1")):
            with pytest.raises(TrainerRefused, match=words) as refused:
                await client.train(batch_id, epoch=3, lr=lr, mini_batches=halves(drawn))
            assert refused.value.status == 409

        canary = [5, 7, 11, 13, 17]
        first = await client.snapshot(3, 1, bucket_bytes=20_000, canary_ids=canary)
        assert [bucket.key for bucket in first.buckets] == [f"test/weights/3/1/{i}" for i in range(len(first.buckets))]
        assert len(first.buckets) > 2
        sent = weights(first)
        assert "lm_head.weight" not in sent and sent.keys() == first.tensors.keys(), "a tied embedding goes once"
        for name, facts in first.tensors.items():
            assert list(sent[name].shape) == facts.shape and str(sent[name].dtype) == facts.dtype
            assert hashlib.sha256(sent[name].tobytes()).hexdigest() == facts.sha256
        again = await client.snapshot(3, 1, bucket_bytes=20_000, canary_ids=canary)
        assert again == first, "an earlier attempt's objects are replaced"
        row = rows.put("canary", rows.columns(np.random.default_rng(0), 1, 4) | {"input_ids": np.array(canary, np.int32)}, 1.0)
        alone = (await client.logprobs([row])).log_probs["canary"]
        assert np.allclose(alone, first.canary.log_probs, atol=1e-6) and len(alone) == len(canary) - 1
        with pytest.raises(TrainerRefused, match="version 1, not 2"):
            await client.snapshot(3, 2, bucket_bytes=20_000, canary_ids=canary)
        store.free([bucket.ref() for bucket in first.buckets])


async def test_what_cannot_be_done_is_refused_in_words_and_the_trainer_stays_well(
    start: Any, rows: Any, store: EmbeddedStore, tmp_path: Path, models: dict[str, str]
) -> None:
    async with start(dp=2, token="secret") as trainer:
        client, raw = trainer.client, {"headers": {"authorization": "Bearer secret"}}

        async def refusal(call: Any) -> tuple[int, str]:
            with pytest.raises(TrainerRefused) as refused:
                await call
            return refused.value.status, refused.value.message

        stranger = TrainerClient(trainer.url, trainer.http, "wrong")
        assert (await refusal(stranger.health()))[0] == 401
        assert (await refusal(stranger.load()))[0] == 401
        drawn = rows.ragged(31, 4)
        assert (await refusal(client.train(0, 0, 1e-3, halves(drawn)))) == (409, "no weights are loaded: POST /v1/load or /v1/resume first")
        assert "holds no config.json" in (await refusal(client.load(str(tmp_path))))[1]
        odd = tmp_path / "odd"
        odd.mkdir()
        (odd / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
        (odd / "model.safetensors").touch()
        known = "supported are llama, qwen2, qwen3, qwen3_moe"
        assert (await refusal(client.load(str(odd)))) == (400, f"model type 'gpt2' is not supported; {known}")
        biased = tmp_path / "biased"
        shutil.copytree(models["qwen2"], biased)
        (biased / "config.json").write_text((biased / "config.json").read_text().replace("qwen2", "llama"))
        assert "nothing takes model.layers.0.self_attn.k_proj.bias" in (await refusal(client.load(str(biased))))[1]
        await client.load()

        answer = await trainer.http.post(f"{trainer.url}/v1/save", json={"directory": "x", "kep_last": 1}, **raw)
        assert (answer.status_code, answer.json()["detail"]) == (422, "body.kep_last: unknown field")
        answer = await trainer.http.post(f"{trainer.url}/v1/train", json={"batch_id": 0}, **raw)
        assert answer.status_code == 422 and "body.lr: missing" in answer.json()["detail"]
        for_one = [MiniBatch(ranks=[[drawn]])]
        assert "for 1 data-parallel ranks, this trainer has 2" in (await refusal(client.train(0, 0, 1e-3, for_one)))[1]
        twice = [MiniBatch(ranks=[[drawn], [drawn[:1]]])]
        assert "a row twice" in (await refusal(client.train(0, 0, 1e-3, twice)))[1]

        columns = rows.columns(np.random.default_rng(1), 3, 4)
        gone = rows.put("gone", columns, 1.0)
        store.free([gone.rollout.ref()])
        wrong = {
            "gone": (gone, 410, "row gone: "),
            "long": (rows.put("long", columns, 1.0).model_copy(update={"length": 9}), 422, r"row long holds (7,) tokens"),
            "foreign": (rows.put("foreign", columns | {"input_ids": np.full(7, 96, np.int32)}, 1.0), 422, "outside the vocabulary of 96"),
            "cold": (rows.put("cold", columns | {"temperature": np.float32(0.0)}, 1.0), 422, "temperature 0.0"),
        }
        for row, status, words in wrong.values():
            code, message = await refusal(client.train(0, 0, 1e-3, [MiniBatch(ranks=[[drawn], [[row]]])]))
            assert code == status and words in message
        assert "has no column input_ids" in (await refusal(client.logprobs([drawn[0].model_copy(update={"rollout": _reward(store)})])))[1]
        assert (await client.train(0, 0, 1e-3, halves(drawn))).trained_version == 1
        nothing = await client.train(1, 0, 1e-3, [])
        assert nothing.trained_version == 2 and nothing.skipped and "no token to train" in nothing.skipped
        assert (await client.health()).incarnation == 0


def _reward(store: EmbeddedStore) -> Any:
    from trainer.wire import WireRef

    return WireRef.of(store.put(f"test/{time.monotonic_ns()}/reward", {"score": np.float32(1.0)}))


async def test_resume_is_bit_equal_and_refuses_half_a_checkpoint_W7(
    start: Any, rows: Any, store: EmbeddedStore, tmp_path: Path, lab: Any, make_spec: MakeSpec, plan: Any
) -> None:
    directory = tmp_path / "checkpoints"
    drawn = [rows.ragged(40 + i, 8) for i in range(3)]
    async with start(dp=2) as trainer:
        client = trainer.client

        async def now() -> dict[str, np.ndarray]:
            snapshot = await client.snapshot(0, (await client.health()).trained_version, 1 << 20, [])
            found = weights(snapshot)
            store.free([bucket.ref() for bucket in snapshot.buckets])
            return found

        await client.load()
        await client.save(str(directory))
        for batch_id in (0, 1):
            await client.train(batch_id, 0, 1e-2, halves(drawn[batch_id]))
        saved = await client.save(str(directory), keep_last=1)
        assert saved.path == str(directory / "step_00000002") and saved.trained_version == 2
        assert os.listdir(directory) == ["step_00000002"]
        await client.train(2, 0, 1e-2, halves(drawn[2]))
        expected = await now()

        await client.load()
        assert (await client.resume(saved.path)).trained_version == 2
        report = await client.train(2, 0, 1e-2, halves(drawn[2]))
        found = await now()
        assert report.trained_version == 3 and all(np.array_equal(found[name], expected[name]) for name in expected)

        hf = make_spec(model_path=f"{saved.path}/hf")
        loaded = lab.reference(hf, [plan(0, [[[drawn[2]]]])]).arrays
        await client.resume(saved.path)
        ours = (await client.logprobs(drawn[2])).log_probs
        assert all(np.abs(loaded[f"log_probs/{row_id}"] - ours[row_id]).max() < 5e-6 for row_id in ours)
        assert {"config.json", "model.safetensors", "tokenizer_config.json"} <= set(os.listdir(f"{saved.path}/hf"))

        (Path(saved.path) / "optimizer/exp_avg/model.safetensors").write_bytes(b"cut")
        with pytest.raises(TrainerRefused, match=r"optimizer/exp_avg/model.safetensors has 3 bytes of"):
            await client.resume(saved.path)
        assert (await client.health()).trained_version == 2


@pytest.mark.parametrize("case", ["old format", "another optimizer", "damaged inside", "another model"])
async def test_what_cannot_be_resumed_is_refused_with_what_to_do_and_the_weights_at_hand_stay(
    start: Any, rows: Any, tmp_path: Path, models: dict[str, str], case: str
) -> None:
    """Its files have the right sizes: W7 has nothing to say."""
    async with start(dp=2) as trainer:
        await trainer.client.load()
        await trainer.client.train(0, 0, 1e-2, halves(rows.ragged(44, 6)))
        path = Path((await trainer.client.save(str(tmp_path / "checkpoints"))).path)
        meta = json.loads((path / "meta.json").read_text())
        moments = path / "optimizer/exp_avg_sq/model.safetensors"
        words = {
            "old format": r"older version, whose optimizer state \(rank_\*.pt\).*load the weights alone from .*/hf",
            "another optimizer": "no exp_avg_sq: it was written with another kind of optimizer than adam.*load the weights alone",
            "damaged inside": "optimizer/exp_avg_sq/model.safetensors is damaged: .*Use an older checkpoint",
            "another model": "lacks model.embed_tokens.weight.*Use an older checkpoint",
        }
        if case == "old format":
            del meta["optimizer_steps"], meta["batch_id"]
        elif case == "another optimizer":
            shutil.rmtree(moments.parent)
            del meta["files"]["optimizer/exp_avg_sq/model.safetensors"]
        elif case == "damaged inside":
            moments.write_bytes(b"\xff" * moments.stat().st_size)
        else:
            save_file({"other": np.zeros(3)}, moments)
            meta["files"]["optimizer/exp_avg_sq/model.safetensors"] = moments.stat().st_size
        (path / "meta.json").write_text(json.dumps(meta))
        await trainer.client.train(1, 0, 1e-2, halves(rows.ragged(45, 6)))
        with pytest.raises(TrainerRefused, match=words[case]) as refused:
            await trainer.client.resume(str(path))
        assert refused.value.status == 409 and (await trainer.client.health()).trained_version == 2


@pytest.mark.parametrize("broken_value", [np.nan, np.inf, -np.inf])
async def test_weights_with_nan_are_not_pushed(
    start: Any, store: EmbeddedStore, models: dict[str, str], tmp_path: Path, broken_value: float
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(models["llama"], broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][3] = broken_value
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    async with start() as trainer:
        await trainer.client.load(str(broken))
        objects = store.stats().objects
        with pytest.raises(TrainerRefused, match=r"model.norm.weight holds NaN"):
            await trainer.client.snapshot(77, 0, 10_000, [])  # keys that no other test has left behind
        assert store.stats().objects == objects, "the buckets before it were freed"
        await trainer.client.load()
        assert (await trainer.client.snapshot(0, 0, 10_000, [])).canary.log_probs == []


async def test_H9_when_a_rank_is_killed_the_others_do_not_wait_and_a_new_group_works(start: Any, rows: Any) -> None:
    async with start(dp=2) as trainer:
        await trainer.client.load()
        await trainer.client.train(0, 0, 1e-3, halves(rows.ragged(60, 8)))
        for incarnation, victim in ((1, 1), (2, 0)):
            ranks = trainer.rank_pids()
            killed = time.monotonic()
            os.kill(ranks[victim], signal.SIGKILL)
            health = await trainer.until(lambda health, wanted=incarnation: health.incarnation == wanted)
            assert time.monotonic() - killed < 5.0
            assert health.state == "empty" and health.trained_version == 0
            assert not set(ranks) & set(trainer.rank_pids())
        await trainer.client.load()
        report = await trainer.client.train(0, 0, 1e-3, halves(rows.ragged(61, 8)))
        assert report.trained_version == 1
        assert "rank 1 was killed by SIGKILL" in trainer.log.read_text()


async def test_H9_a_rank_killed_inside_a_command_ends_the_call_at_once(start: Any, rows: Any) -> None:
    async with start(dp=2) as trainer:
        await trainer.client.load()
        victim = trainer.rank_pids()[1]
        os.kill(victim, signal.SIGSTOP)  # rank 0 now waits for it inside the step
        call = asyncio.create_task(trainer.client.train(0, 0, 1e-3, halves(rows.ragged(62, 8)), deadline_s=20.0))
        await trainer.until(lambda health: health.state == "busy")
        health = await trainer.client.health()
        assert health.state == "busy", "health answers while the group is stuck"
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(TrainerLost):
            await asyncio.wait_for(call, 5.0)
        await trainer.until(lambda health: health.incarnation == 1 and health.state == "empty")


async def test_idle_ranks_outlive_the_control_timeout(start: Any, rows: Any) -> None:
    async with start(dp=2, control_timeout_s=1.0) as trainer:
        await trainer.client.load()
        await asyncio.sleep(1.5)
        assert (await trainer.client.train(0, 0, 1e-3, halves(rows.ragged(63, 8)))).trained_version == 1
        assert (await trainer.client.health()).incarnation == 0


async def test_it_gives_up_with_words_after_too_many_quick_deaths(start: Any, lab: Any) -> None:
    async with start(max_quick_deaths=2) as trainer:
        for incarnation in (0, 1):
            await trainer.until(lambda health, wanted=incarnation: health.incarnation == wanted)
            os.kill(trainer.rank_pids()[0], signal.SIGKILL)
        assert lab.ask("wait", pid=trainer.pid)["code"] == 3
        assert "gave up: rank 0 was killed by SIGKILL" in trainer.log.read_text()
        with pytest.raises(TrainerLost):
            await trainer.client.health()


async def test_stop_ends_the_group_with_exit_code_0(start: Any, lab: Any) -> None:
    async with start(dp=2) as trainer:
        await trainer.client.stop()
        assert lab.ask("wait", pid=trainer.pid)["code"] == 0


async def test_ranks_end_with_their_parent_whatever_ends_it(start: Any, lab: Any) -> None:
    for number, code in ((signal.SIGTERM, 0), (signal.SIGKILL, -9)):
        async with start(dp=2) as trainer:
            ranks = trainer.rank_pids()
            asked = time.monotonic()
            os.kill(trainer.pid, number)
            assert lab.ask("wait", pid=trainer.pid)["code"] == code
            while any(map(alive, ranks)):
                assert time.monotonic() - asked < 5.0
                await asyncio.sleep(0.01)


def test_by_the_command_line_it_names_a_taken_port_serves_and_dies_with_the_driver(make_spec: MakeSpec, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    spec = make_spec("demo")
    spec.run_dir.mkdir()

    def command(name: str, text: str) -> list[str]:
        path = spec.run_dir / f"{name}.json"
        path.write_text(text)
        return [sys.executable, "-P", "-m", "trainer.main", "--spec", str(path)]

    driver = (
        "import os, subprocess; environment = dict(os.environ, HEADRACE_PARENT_PID=str(os.getpid()))\n"
        f"child = subprocess.Popen({command('spec', spec.model_dump_json())!r}, env=environment)\n"
        "print(child.pid, flush=True); child.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", driver], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        pid = int(process.stdout.readline())
        try:
            port = asyncio.run(port_of(spec.run_dir))
            taken = spec.model_copy(update={"port": port}).model_dump(mode="json")
            refused = subprocess.run(
                command("taken", json.dumps(taken)), env=environment, capture_output=True, text=True, timeout=60, check=False
            )
            assert refused.returncode == 2 and "Choose another port" in refused.stdout, refused.stdout + refused.stderr
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/load", json={}, timeout=60.0)
            assert (answer.status_code, answer.json()) == (200, {"trained_version": 0})
        finally:
            process.kill()
    give_up = time.monotonic() + 5.0
    while alive(pid):
        assert time.monotonic() < give_up, "the trainer outlived its driver"
        time.sleep(0.02)


@pytest.mark.slow
def test_ranks_can_be_started_by_hand_with_torchrun_s_variables(make_spec: MakeSpec, rows: Any, tmp_path: Path) -> None:
    spec = make_spec("demo", dp=2)
    spec.run_dir.mkdir()
    (spec.run_dir / "spec.json").write_text(spec.model_dump_json())
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--max-restarts=0",
        "--standalone",
        "-m",
        "trainer.rank",
    ]
    command += ["--spec", str(spec.run_dir / "spec.json")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout
        try:
            port = next(line.rsplit(" ", 1)[1] for line in process.stdout if line.startswith("trainer: 2 ranks up"))
            url = f"http://127.0.0.1:{int(port)}"
            assert httpx.post(f"{url}/v1/load", json={}, timeout=60.0).json() == {"trained_version": 0}
            assert httpx.post(f"{url}/v1/stop", json={}, timeout=60.0).status_code == 200
            assert process.wait(30) == 0
        finally:
            process.terminate()  # torchrun ends its ranks


def alive(pid: int) -> bool:
    """Not gone, and not a zombie that only waits to be collected."""
    return Path(f"/proc/{pid}/exe").exists()


async def port_of(run_dir: Path) -> int:
    give_up = time.monotonic() + 60.0
    while True:
        try:
            return int(json.loads((run_dir / "trainer.json").read_text())["port"])
        except (FileNotFoundError, json.JSONDecodeError):
            assert time.monotonic() < give_up
            await asyncio.sleep(0.02)


async def test_a_function_of_the_user_s_that_fails_in_training_is_the_answer_and_nothing_can_be_saved_of_what_it_left(
    start: Any, rows: Any, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "def loss(tokens, spec):\n    if len(tokens.row) > 6:\n        raise RuntimeError('too many for me')\n"
        "    return -tokens.advantage * (tokens.log_probs - tokens.old).exp()\n"
    )
    rng = np.random.default_rng(71)
    short, long = (rows.put(name, rows.columns(rng, 3, size), 1.0) for name, size in (("short", 3), ("long", 40)))
    async with start(dp=2, loss={"policy": f"{tmp_path}/mine.py:loss"}) as trainer:
        await trainer.client.load()
        pids = trainer.rank_pids()
        await trainer.client.train(0, 0, 1e-3, [MiniBatch(ranks=[[[short]], []])])
        half = [MiniBatch(ranks=[[[short]], []]), MiniBatch(ranks=[[], [[long]]])]
        with pytest.raises(TrainerRefused, match=r"mine.py:loss failed on \d+ tokens: RuntimeError: too many for me"):
            await trainer.client.train(1, 0, 1e-3, half)
        with pytest.raises(TrainerRefused, match="no weights are loaded"):
            await trainer.client.save(str(tmp_path / "checkpoints"))
        assert (await trainer.client.health()).state == "empty" and trainer.rank_pids() == pids, "no rank died of it"
        await trainer.client.load()
