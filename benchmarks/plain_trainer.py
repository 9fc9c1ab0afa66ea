"""The training step as one writes it without a service: torch and transformers in one process, on rows from the same store.

Done well, so that a comparison is worth something: attention by SDPA, rows of similar length together under the same budget of tokens and
padded on the right (causal attention needs no mask then), the output layer on the trained tokens only, torch's fused Adam; `alone` instead
of `padded` takes one row at a time. What the product counts on the side (entropy, KL, clip fraction, gaps, accounts) is left out.

Serves JSON lines on stdin and stdout: `python -m benchmarks.plain_trainer`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from store import open_store
from trainer.spec import LossSpec, OptimizerSpec
from trainer.wire import PlanRow, TrainRequest


def make_model(path: str, **shape: Any) -> dict[str, Any]:
    """Random weights, saved where the trainer can load them."""
    torch.manual_seed(0)
    config = Qwen3Config(**shape, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    Qwen3ForCausalLM(config).save_pretrained(path)
    (Path(path) / "tokenizer_config.json").write_text("{}")
    return {}


class Loop:
    """One model, one optimizer."""

    def __init__(self, path: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").train()
        adam = OptimizerSpec()
        groups = [{"params": [p for p in self._model.parameters() if (p.dim() > 1) == decayed]} for decayed in (True, False)]
        self._optimizer = torch.optim.AdamW(groups, betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay, fused=True)
        self._grad_clip, self._loss = adam.grad_clip, LossSpec()

    def step(self, request: TrainRequest, how: str, budget_tokens: int) -> dict[str, Any]:
        """One mini-batch of one rank. PPO's clipped loss, averaged over the trained tokens."""
        started = time.perf_counter()
        [mini_batch] = request.mini_batches
        [share] = mini_batch.ranks
        rows = [row for micro_batch in share for row in micro_batch]
        micro_batches = _filled(rows, budget_tokens) if how == "padded" else [[row] for row in rows]
        batches = [[_read(row) for row in rows] for rows in micro_batches]
        count = sum(int(columns["response_mask"].sum()) for rows in batches for columns, _ in rows)
        self._optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for read in batches:
            loss = self._loss_of(read) / count
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._grad_clip)
        for group in self._optimizer.param_groups:
            group["lr"] = request.lr
        self._optimizer.step()
        return {"loss": total, "grad_norm": float(norm), "seconds": time.perf_counter() - started}

    def _loss_of(self, rows: list[tuple[Any, float]]) -> torch.Tensor:
        longest = max(len(columns["input_ids"]) for columns, _ in rows)
        ids = np.zeros((len(rows), longest), np.int64)
        mask = np.zeros((len(rows), longest - 1), bool)
        behaviour, advantage = np.zeros(mask.shape, np.float32), np.zeros(mask.shape, np.float32)
        temperature = np.ones(mask.shape, np.float32)
        for index, (columns, of_row) in enumerate(rows):
            length = len(columns["input_ids"])
            ids[index, :length] = columns["input_ids"]
            mask[index, : length - 1] = columns["response_mask"]
            behaviour[index, : length - 1] = columns["rollout_log_probs"]
            advantage[index], temperature[index] = of_row, columns["temperature"]
        tokens, where = torch.from_numpy(ids), torch.from_numpy(mask)
        hidden = self._model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1][where]
        logits = self._model.lm_head(hidden) / torch.from_numpy(temperature[mask])[:, None]
        log_probs = -F.cross_entropy(logits, tokens[:, 1:][where], reduction="none")
        ratio = torch.exp(log_probs - torch.from_numpy(behaviour[mask]))
        gain = torch.from_numpy(advantage[mask])
        return -torch.minimum(ratio * gain, ratio.clamp(1.0 - self._loss.clip_low, 1.0 + self._loss.clip_high) * gain).sum()


def _filled(rows: list[PlanRow], budget_tokens: int) -> list[list[PlanRow]]:
    """By length, the longest first; padding counts."""
    batches: list[list[PlanRow]] = []
    for row in sorted(rows, key=lambda row: -row.length):
        if not batches or (len(batches[-1]) + 1) * batches[-1][0].length > budget_tokens:
            batches.append([])
        batches[-1].append(row)
    return batches


def _read(row: PlanRow) -> tuple[Any, float]:
    return open_store(row.rollout.location).open(row.rollout.ref()), row.advantage


def main() -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    loops: dict[str, Loop] = {}
    for line in sys.stdin:
        name, arguments = json.loads(line)
        if name == "make_model":
            answer = make_model(**arguments)
        else:
            path = arguments["path"]
            if path not in loops:
                loops[path] = Loop(path)
            answer = loops[path].step(TrainRequest.model_validate(arguments["request"]), arguments["how"], arguments["budget_tokens"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
