"""The demo's work done three ways: asynchronous (S = 2), synchronous (S = 0: no overlap), and as a plain single-process loop.

Same model, prompts, group size, loss and optimizer step each time; batches per minute from the median time between steps, and the
share of the time in which engine and trainer worked. The plain loop is `transformers.generate` and torch's AdamW with no service, no
HTTP and no accounts, given both cores; on a model of megabytes it is expected to win, and the README says so.

    python -m benchmarks.overlap [--quick] [--json FILE]
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import Aim, arguments, median, report
from driver.archive import read_metrics

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "examples/sort_digits/config.yaml"
DATA = ROOT / "examples/sort_digits/data.jsonl"
WARM_UP = 3  # batches not measured: the first requests, the first compilations
PLAIN = "plain"


def settings_of(bound: int, batches: int, directory: Path) -> list[str]:
    """What differs from the demo's configuration."""
    settings = [f"staleness.bound={bound}", f"stop.batches={batches}", f"run_dir={directory}", "service.port=0", f"data={DATA}"]
    settings += [f"store.directory=/dev/shm/headrace-bench-{time.time_ns():x}", "checkpoint.every=100"]
    return settings


def service(bound: int, batches: int, directory: Path) -> dict[str, float]:
    """One run of the service; periods between applied batches, and busy shares, after the warm-up."""
    settings = settings_of(bound, batches, directory)
    argv = [sys.executable, "-P", "-m", "driver.cli", "up", str(CONFIG), "--quiet", "--exit-when-done"]
    subprocess.run([*argv, *(p for s in settings for p in ("--set", s))], check=True, timeout=600)
    rows = read_metrics(directory)[WARM_UP:]
    return {
        "period_s": median([b["time_s"] - a["time_s"] for a, b in itertools.pairwise(rows)]),
        "engine_busy": median([r["engine_busy"] for r in rows if r["engine_busy"] is not None]),
        "trainer_busy": median([r["trainer_busy"] for r in rows if r["trainer_busy"] is not None]),
        "staleness_mean": median([r["staleness_mean"] for r in rows]),
    }


def plain(batches: int) -> dict[str, float]:
    """The single-process loop, in a process of its own so that its torch uses both cores."""
    argv = [sys.executable, "-m", "benchmarks.overlap", PLAIN, str(batches)]
    done = subprocess.run(argv, check=True, capture_output=True, timeout=600, cwd=ROOT, env=None)
    return json.loads(done.stdout.splitlines()[-1])


def plain_loop(batches: int) -> None:
    """GRPO with PPO-clip in forty lines: generate, score, one AdamW step. Prints the median period."""
    import os

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from reward.plugin import load

    torch.set_num_threads(os.cpu_count() or 1)
    base = ROOT / "examples/sort_digits/base"
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
    score = load(f"{ROOT}/examples/sort_digits/reward.py:score", ROOT)
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    random.Random(0).shuffle(rows)
    ends = []
    for batch in range(batches):
        chosen = [row for row in rows[batch * 16 : batch * 16 + 16] for _ in range(8)]
        inputs = tokenizer([row["prompt"] for row in chosen], return_tensors="pt", padding=True)
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=16, do_sample=True, top_k=0, temperature=1.0, pad_token_id=0, eos_token_id=2)
        prompt = inputs["input_ids"].shape[1]
        answers = ids[:, prompt:]
        mask = ((answers == 2).cumsum(1) - (answers == 2).long()) == 0
        texts = tokenizer.batch_decode(torch.where(mask, answers, 0), skip_special_tokens=True)
        cut = ~(answers == 2).any(1)
        rewards = torch.tensor(
            [score(t, {**r, "finish_reason": "length" if c else "stop"})["score"] for t, r, c in zip(texts, chosen, cut, strict=True)]
        )
        advantage = (rewards.view(-1, 8) - rewards.view(-1, 8).mean(1, keepdim=True)).view(-1, 1)
        attention = torch.cat([inputs["attention_mask"], mask.long()], 1)
        logits = model(ids, attention_mask=attention, position_ids=(attention.cumsum(1) - 1).clamp(0)).logits[:, prompt - 1 : -1]
        log_probs = torch.log_softmax(logits.float(), -1).gather(-1, answers[..., None])[..., 0]
        ratio = torch.exp(log_probs - log_probs.detach())
        loss = -(torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ends.append(time.monotonic())
    periods = [b - a for a, b in zip(ends[WARM_UP:], ends[WARM_UP + 1 :], strict=False)]
    print(json.dumps({"period_s": median(periods)}))


def main() -> int:
    if sys.argv[1:2] == [PLAIN]:
        plain_loop(int(sys.argv[2]))
        return 0
    options = arguments(__doc__)
    rounds, batches = (1, 10) if options.quick else (3, 40)
    seen: dict[str, list[dict[str, float]]] = {"async": [], "sync": [], PLAIN: []}
    with tempfile.TemporaryDirectory() as directory:
        for number in range(rounds):  # alternating, so that the machine's moods fall on all three
            seen["async"].append(service(2, batches, Path(directory) / f"async{number}"))
            seen["sync"].append(service(0, batches, Path(directory) / f"sync{number}"))
            seen[PLAIN].append(plain(batches))
    period = {name: median([run["period_s"] for run in runs]) for name, runs in seen.items()}
    figures = {f"{name}_batches_per_min": 60.0 / value for name, value in period.items()}
    figures["async_over_sync"] = period["sync"] / period["async"]
    figures["plain_over_async"] = period["async"] / period[PLAIN]
    for name in ("async", "sync"):
        for side in ("engine_busy", "trainer_busy"):
            figures[f"{name}_{side}"] = median([run[side] for run in seen[name]])
    figures["async_staleness_mean"] = median([run["staleness_mean"] for run in seen["async"]])
    aims: dict[str, Aim] = {}  # the issue asks for an honest comparison and names no number
    return report("overlap: the demo's work, three ways", figures, aims, options, ["torch", "megatron-core", "transformers", "uvicorn"])


if __name__ == "__main__":
    sys.exit(main())
