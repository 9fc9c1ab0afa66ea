"""Whether a policy loss is the same step for every layout: through Megatron, on real ranks over gloo, with a tiny random model.

Nothing is downloaded and nothing stays: the model is made in a temporary directory, the rows in a temporary store. Ranks are forked from
this process, which therefore never runs autograd itself. One step with all rows in one micro-batch on one rank is compared with the same
step split over micro-batches and over two ranks of each kind.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer import cpu

cpu.install()

from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402
from transformers.utils.logging import disable_progress_bar  # noqa: E402

from store import EmbeddedStore  # noqa: E402
from store.rows import packed  # noqa: E402
from trainer import export  # noqa: E402
from trainer.group import Group  # noqa: E402
from trainer.loss_spec import KLSpec, LossSpec  # noqa: E402
from trainer.main import die_with_parent  # noqa: E402
from trainer.models import begin, policy_loss  # noqa: E402
from trainer.selfcheck_splits import COMPANY, CUT, Finding, log_ratios  # noqa: E402
from trainer.spec import OptimizerSpec, TrainerSpec  # noqa: E402
from trainer.step import Stepper  # noqa: E402
from trainer.wire import MiniBatch, PlanRow, TrainRequest, WireRef  # noqa: E402

LIMIT = 1e-5
RANKS_S = 120.0
VOCABULARY = 96
METRICS = ("loss", "grad_norm", "clip_fraction", "entropy", "kl", "ratio_max", "tokens")
_SPLIT = "a tensor- or pipeline-parallel rank sees the same tokens: the function has asked for something else than tokens and spec"
LAYOUTS: dict[str, tuple[dict[str, int], str]] = {
    "one rank, in micro-batches of 3, last row first": ({}, COMPANY),
    "2 tensor-parallel ranks": ({"tp": 2}, _SPLIT),
    "2 pipeline stages": ({"pp": 2}, _SPLIT),
    "2 context-parallel ranks": ({"cp": 2}, CUT),
    "2 data-parallel ranks": ({"dp": 2}, COMPANY),
}
Arrays = dict[str, np.ndarray]


def check(loss: LossSpec, count: int, seed: int, say: Callable[[str], None]) -> list[Finding]:
    """Gradients, weights and metrics after a step, for each layout. Raises ValueError for a loss that cannot be trained with."""
    with _workplace(loss, seed) as (spec, store):
        rng = np.random.default_rng(seed)
        drawn = [_columns(rng) for _ in range(count)]
        say("the tiny model's log-probs")
        now = _on_ranks(spec, [_put(store, f"draft-{i}", columns, 0.0) for i, columns in enumerate(drawn)], [])
        rows = []
        for i, columns in enumerate(drawn):
            mask = columns["response_mask"]
            behaviour = now[f"log_probs/draft-{i}"] - log_ratios(rng, loss, len(mask))
            columns |= {"rollout_log_probs": np.where(mask, behaviour, 0.0).astype(np.float32)}
            rows.append(_put(store, f"row-{i}", columns, (1.0, -0.7)[i] if i < 2 else float(rng.normal())))
        say("one rank, one micro-batch")
        expected = _on_ranks(spec, [], _plan(loss, rows, 1, count))
        if not any(array.any() for name, array in expected.items() if name.startswith("gradients/")):
            raise ValueError(f"policy {loss.policy} gives no gradient to any weight: is every ratio beyond its clip?")
        findings = []
        for what, (layout, cause) in LAYOUTS.items():
            say(what)
            laid_out = spec.model_copy(update=layout)
            found = _on_ranks(laid_out, [], _plan(loss, rows[::-1], laid_out.dp, 3))
            findings.append(Finding(what, error(found, expected), LIMIT, cause))
        return findings


def error(found: Arrays, expected: Arrays) -> float:
    """The largest difference in any tensor, relative to its largest element; or to a part of that of all, where it is next to nothing."""
    assert found.keys() == expected.keys()
    worst = 0.0
    for kind, part in (("gradients/", 1e-6), ("weights/", 1e-6), ("report/", 1e-2)):
        names = [name for name in expected if name.startswith(kind)]
        floor = part * max(float(np.abs(expected[name]).max()) for name in names)
        for name in names:
            worst = max(worst, float(np.abs(found[name] - expected[name]).max()) / max(float(np.abs(expected[name]).max()), floor))
    return worst


@contextmanager
def _workplace(loss: LossSpec, seed: int) -> Iterator[tuple[TrainerSpec, EmbeddedStore]]:
    root = Path(f"/dev/shm/headrace-selfcheck-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    with tempfile.TemporaryDirectory(prefix="headrace-selfcheck-") as directory:
        if loss.kl.wanted:
            # Another tiny model: the user's has another vocabulary. A penalty on the reward is a critic's affair.
            penalty = 0.0 if loss.kl.in_reward else loss.kl.coefficient
            reference = _make_model(Path(directory) / "reference", seed + 1)
            kl = KLSpec(coefficient=penalty, estimator=loss.kl.estimator, reference=reference)
            loss = loss.model_copy(update={"kl": kl})
        try:
            store = EmbeddedStore(root, 16 << 20)
            yield (
                TrainerSpec(
                    run_id="selfcheck",
                    run_dir=Path(directory) / "run",
                    store_location=store.location,
                    model_path=_make_model(Path(directory) / "model", seed),
                    port=0,
                    loss=loss,
                    # Not Adam, whose first step magnifies the last bits of small gradients; no clip, which would hide their scale.
                    optimizer=OptimizerSpec(kind="sgd", momentum=0.0, grad_clip=0.0),
                ),
                store,
            )
        finally:
            shutil.rmtree(root, ignore_errors=True)


def _make_model(path: Path, seed: int) -> Path:
    """Two layers of random weights in the shape of Qwen3, as transformers writes them."""
    disable_progress_bar()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    return path


def _columns(rng: np.random.Generator) -> dict[str, Any]:
    """A row: a prompt, and a response of which about one token in five is not trained."""
    prompt, response = int(rng.integers(2, 9)), int(rng.integers(1, 24))
    mask = np.zeros(prompt + response - 1, np.uint8)
    mask[prompt - 1 :] = rng.random(response) < 0.8
    mask[-1] = 1
    return {
        "input_ids": rng.integers(0, VOCABULARY, prompt + response).astype(np.int32),
        "response_mask": mask,
        "rollout_log_probs": np.zeros(len(mask), np.float32),
        "version_spans": np.array([[0, 0, 0, len(mask)]], dtype=np.int64),
        "temperature": np.float32(1.0),
    }


def _put(store: EmbeddedStore, row_id: str, columns: dict[str, Any], advantage: float) -> PlanRow:
    ref = store.put(f"selfcheck/{row_id}/rollout", packed([columns]))
    return PlanRow(row_id=row_id, rollout=WireRef.of(ref), advantage=advantage, length=len(columns["input_ids"]))


def _plan(loss: LossSpec, rows: list[PlanRow], dp: int, size: int) -> list[MiniBatch]:
    """One step. A loss against recomputed log-probs gets a second, for in its first all ratios are 1."""
    cut = -(-len(rows) // dp)
    shares = [rows[i : i + cut] for i in range(0, len(rows), cut)]
    ranks = [[share[i : i + size] for i in range(0, len(share), size)] for share in shares]
    return [MiniBatch(ranks=ranks)] * (2 if loss.old_log_probs == "recomputed" else 1)


def _on_ranks(spec: TrainerSpec, rows: list[PlanRow], mini_batches: list[MiniBatch]) -> Arrays:
    """What the ranks of the spec make of it: log-probs of the rows, and gradients and weights after the steps."""
    spec.run_dir.mkdir(exist_ok=True)
    out, log = spec.run_dir / f"{uuid.uuid4().hex}.npz", spec.run_dir / "ranks.log"
    fork = multiprocessing.get_context("fork")
    with socket.create_server(("127.0.0.1", 0)) as rendezvous:
        names = {"WORLD_SIZE": spec.world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": rendezvous.getsockname()[1]}
        # Rank 0 takes the socket over, so that the port is never free in between.
        handle = os.dup(rendezvous.fileno())
        ranks: list[BaseProcess] = [
            fork.Process(target=_rank, args=(os.getpid(), names | {"RANK": rank}, handle, spec, rows, mini_batches, out, log), daemon=True)
            for rank in range(spec.world_size)
        ]
        for process in ranks:
            process.start()
        os.close(handle)
    _await(ranks, log)
    with np.load(out) as arrays:
        return dict(arrays)


def _await(ranks: list[BaseProcess], log: Path) -> None:
    """Raises ValueError, with the last word of the log, when one ends badly or none ends."""
    left = {process.sentinel: process for process in ranks}
    try:
        while left:
            ended = wait(list(left), timeout=RANKS_S)
            if not ended:
                raise ValueError(f"{len(left)} of {len(ranks)} ranks were still at work after {RANKS_S:g} s")
            for sentinel in ended:
                process = left.pop(sentinel)  # type: ignore[arg-type]
                process.join()
                if process.exitcode:
                    words = log.read_text().strip().splitlines() if log.exists() else []
                    raise ValueError(f"a rank ended with {process.exitcode}: {words[-1] if words else 'it said nothing'}")
    finally:
        for process in left.values():
            process.kill()
            process.join()


def _rank(
    parent_pid: int,
    names: dict[str, Any],
    rendezvous: int,
    spec: TrainerSpec,
    rows: list[PlanRow],
    mini_batches: list[MiniBatch],
    out: Path,
    log: Path,
) -> None:
    die_with_parent(parent_pid)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    cpu.enter_mode()
    group = Group(spec, rendezvous)
    model = begin(spec, group, spec.model_path)
    stepper = Stepper(spec, group, model, policy_loss(spec, group), lambda: None)
    arrays = {f"log_probs/{row_id}": np.array(values) for row_id, values in stepper.log_probs(rows).items()} if rows else {}
    if mini_batches:
        report = stepper.train(TrainRequest(batch_id=0, epoch=0, lr=1e-2, mini_batches=mini_batches))
        if report.skipped:
            raise ValueError(f"the step was skipped: {report.skipped}")
        arrays |= {f"report/{name}": np.array(getattr(report, name)) for name in METRICS}
        arrays |= {f"weights/{name}": tensor.numpy().copy() for name, tensor in export.hf_tensors(model)}
        for parameter in model.chunk.parameters():
            parameter.data.copy_(parameter.main_grad)  # exported in their place; this process ends after it
        arrays |= {f"gradients/{name}": tensor.numpy().copy() for name, tensor in export.hf_tensors(model)}
    if group.rank == 0:
        np.savez(out, allow_pickle=False, **arrays)
    group.agree()
