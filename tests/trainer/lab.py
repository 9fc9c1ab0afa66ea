"""A warm process that does the tests' heavy work: torch, Megatron and transformers are imported once, every job is a fork.

Jobs come as JSON lines on stdin, answers go out as JSON lines; arrays travel as .npz files. A job on a layout forks its ranks, which run
the product's own code; the reference is plain transformers and torch, each row alone, written without a look at the product.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from store import open_store  # noqa: E402
from trainer import cpu, export, main, rank, saving, state  # noqa: E402  (installs the CPU shim before megatron comes in)
from trainer.group import Group  # noqa: E402
from trainer.model import Model, PackedAttention, TransformerLayer, build  # noqa: E402
from trainer.spec import TrainerSpec  # noqa: E402
from trainer.step import Stepper  # noqa: E402
from trainer.wire import PlanRow, TrainRequest  # noqa: E402

assert rank.REQUESTS
LAYOUT_S = 90.0
"""Eight ranks on two busy cores take some seconds; the tests' own limit is longer than this."""


def make_models(directory: str) -> dict[str, str]:
    """Tiny models with random weights; norms too, so that a norm left out shows."""
    shape: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    shape |= {"intermediate_size": 96, "max_position_embeddings": 256, "initializer_range": 0.1}
    demo: dict[str, Any] = {
        "vocab_size": 259,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    demo |= {"head_dim": 64, "intermediate_size": 384, "max_position_embeddings": 256}

    odd = shape | {"vocab_size": 97, "num_key_value_heads": 1}

    def rope(theta: float) -> Any:
        return {"rope_type": "default", "rope_theta": theta}

    kinds: dict[str, tuple[Any, Any]] = {
        "qwen3": (Qwen3ForCausalLM, Qwen3Config(**shape, head_dim=24, tie_word_embeddings=False, rope_parameters=rope(10000.0))),
        "qwen3_tied": (Qwen3ForCausalLM, Qwen3Config(**shape, head_dim=16, tie_word_embeddings=True, rope_parameters=rope(50000.0))),
        "qwen2": (Qwen2ForCausalLM, Qwen2Config(**shape, tie_word_embeddings=False, rope_parameters=rope(10000.0))),
        "llama": (LlamaForCausalLM, LlamaConfig(**shape, tie_word_embeddings=False, rope_parameters=rope(10000.0))),
        "llama_tied": (LlamaForCausalLM, LlamaConfig(**shape, tie_word_embeddings=True, rope_parameters=rope(500.0))),
        "demo": (Qwen3ForCausalLM, Qwen3Config(**demo, tie_word_embeddings=True, rope_parameters=rope(10000.0))),
        "qwen3_odd": (Qwen3ForCausalLM, Qwen3Config(**odd, head_dim=16, tie_word_embeddings=True, rope_parameters=rope(10000.0))),
    }
    paths = {}
    for number, (name, (kind, config)) in enumerate(kinds.items()):
        torch.manual_seed(number)
        model = kind(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.uniform_(0.5, 1.5)
        paths[name] = str(Path(directory) / name)
        model.save_pretrained(paths[name])
        (Path(paths[name]) / "tokenizer_config.json").write_text("{}")
    return paths


def reference(model_path: str, spec: dict[str, Any], requests: list[dict[str, Any]], out: str) -> dict[str, Any]:
    """The same steps in plain torch. Saves log-probs before the first step, and gradients and weights after the last.

    In bf16 it keeps no fp32 weights: its first gradients say what that dtype's rounding does, its later ones nothing.
    """
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, spec["dtype"]), attn_implementation="eager").train()
    loss_spec, opt = spec["loss"], spec["optimizer"]
    names = dict(model.named_parameters())
    groups = [
        {"params": [p for p in names.values() if p.dim() > 1], "weight_decay": opt["weight_decay"]},
        {"params": [p for p in names.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    if opt["kind"] == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=0.0, momentum=opt["momentum"])
    else:
        optimizer = torch.optim.AdamW(groups, lr=0.0, betas=tuple(opt["betas"]), eps=opt["eps"])

    def row_log_probs(row: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        lease = open_store(row["rollout"]["location"]).open(PlanRow(**row).rollout.ref())
        ids = torch.tensor(lease["input_ids"].astype(np.int64))[None]
        logits = model(ids, use_cache=False).logits[0, :-1].float() / float(lease["temperature"])
        every = logits.log_softmax(-1)
        return every.gather(1, ids[0, 1:, None])[:, 0], -(every.exp() * every).sum(-1)

    arrays: dict[str, np.ndarray] = {}
    reports = []
    for step, request in enumerate(requests):
        for mini_batch in request["mini_batches"]:
            rows = [row for ranks in mini_batch["ranks"] for micro in ranks for row in micro]
            optimizer.zero_grad()
            total, count, entropy_sum, row_count = torch.zeros(()), 0, 0.0, 0
            for row in rows:
                lease = open_store(row["rollout"]["location"]).open(PlanRow(**row).rollout.ref())
                chosen = torch.tensor(np.flatnonzero(lease["response_mask"]))
                log_probs, entropy = row_log_probs(row)
                if step == 0:
                    arrays[f"log_probs/{row['row_id']}"] = log_probs.detach().numpy()
                log_ratio = log_probs[chosen] - torch.tensor(lease["rollout_log_probs"][chosen.numpy()])
                gain = row_gain(loss_spec, log_ratio, log_probs[chosen], row["advantage"])
                gain = gain + loss_spec["entropy_bonus"] * entropy[chosen]
                total = total - (gain.mean() if loss_spec["aggregation"] == "sequence_mean_token_mean" else gain.sum())
                count += len(chosen)
                row_count += 1
                entropy_sum += float(entropy[chosen].sum())
            loss = total / {"token_mean": count, "constant": loss_spec["divisor"]}.get(loss_spec["aggregation"], row_count)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), opt["grad_clip"])
            for group in optimizer.param_groups:
                group["lr"] = request["lr"]
            optimizer.step()
        reports.append({"loss": float(loss), "grad_norm": float(norm), "entropy": entropy_sum / count, "tokens": count})
        arrays |= {f"gradients/{step}/{name}": p.grad.float().numpy() + 0 for name, p in names.items()}
    arrays |= {f"weights/{name}": p.detach().float().numpy() for name, p in names.items()}
    np.savez(out, allow_pickle=False, **arrays)
    return {"reports": reports}


def row_gain(loss: dict[str, Any], log_ratio: torch.Tensor, log_probs: torch.Tensor, advantage: float) -> torch.Tensor:
    """What each token of one row is to gain, by the papers' formulas; GSPO's is the same number at each."""
    ratio = log_ratio.mean().exp().expand(len(log_ratio)) if loss["policy"] == "gspo" else log_ratio.exp()
    bounded = torch.clip(ratio, 1 - loss["clip_low"], 1 + loss["clip_high"])
    if loss["policy"] == "cispo":
        return bounded.detach() * advantage * log_probs
    gain = torch.minimum(ratio * advantage, bounded * advantage)
    if loss["policy"] == "dual_clip" and advantage < 0:
        return torch.clip(gain, min=loss["dual_clip"] * advantage)
    return gain


def layout(
    spec: dict[str, Any], requests: list[dict[str, Any]], out: str, resume: str | None = None, save: str | None = None, second: bool = False
) -> dict[str, Any]:
    """The product's steps, on as many forked ranks as the spec has; from a checkpoint, into a directory of checkpoints.

    With `second` the checkpoint holds another model too, which has taken the first step only.
    """
    facts = TrainerSpec.model_validate(spec)
    with socket.create_server(("127.0.0.1", 0)) as rendezvous:
        port = rendezvous.getsockname()[1]
    result = Path(out).with_suffix(".json")
    children = []
    for number in range(facts.world_size):
        names = {"RANK": number, "WORLD_SIZE": facts.world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        children.append(_fork(lambda names=names: _layout_rank(facts, names, requests, out, result, resume, save, second)))  # type: ignore[misc]
    _await_ranks(children)
    answer: dict[str, Any] = json.loads(result.read_text())
    return answer


def _await_ranks(pids: list[int]) -> None:
    """Returns when all have ended well; else, or at the deadline, none is left to wait for a dead one."""
    left, failure, deadline = set(pids), None, time.monotonic() + LAYOUT_S
    while left and failure is None:
        for pid in list(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.remove(pid)
                if code := os.waitstatus_to_exitcode(status):
                    failure = f"rank {pids.index(pid)} ended with {code}"
        if time.monotonic() > deadline:
            failure = f"{len(left)} of {len(pids)} ranks were still at work after {LAYOUT_S:g} s"
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if failure:
        raise RuntimeError(failure)


def _layout_rank(
    facts: TrainerSpec,
    names: dict[str, Any],
    requests: list[dict[str, Any]],
    out: str,
    result: Path,
    resume: str | None,
    save: str | None,
    second: bool,
) -> None:
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    cpu.enter_mode()
    group = Group(facts)
    model = saving.resume(facts, group, Path(resume))[0] if resume else build(facts, group, facts.model_path)
    stepper = Stepper(facts, group, model, lambda: None)
    arrays: dict[str, np.ndarray] = {}
    if resume:
        arrays |= _kept(facts, model, "resumed")
        checkpoint = saving.open_checkpoint(group, Path(resume))
        if (beside := checkpoint.directory_of("second")).is_dir():
            other = build(facts, group, beside / "hf")
            saving.restore(facts, group, other, checkpoint, "second")
            arrays |= _kept(facts, other, "second")
    if requests:
        rows = {row.row_id: row for mini in TrainRequest(**requests[0]).mini_batches for row in mini.rows()}
        arrays |= {f"log_probs/{row_id}": np.array(values) for row_id, values in stepper.log_probs(list(rows.values())).items()}
    reports = []
    seen = _watch(model)
    for step, request in enumerate(requests):
        reports.append(stepper.train(TrainRequest(**request)).model_dump())
        if not facts.distributed_optimizer:  # there a rank has the sum of its part of the gradients only
            gradients = export.hf_tensors(model, lambda parameter: parameter.main_grad)  # type: ignore[attr-defined]
            arrays |= {f"gradients/{step}/{name}": tensor.numpy().copy() for name, tensor in gradients}
    exported = [(name, tensor.float().numpy().copy()) for name, tensor in export.hf_tensors(model)]
    assert len(exported) == len(dict(exported)), "each name once, tied embeddings over pipeline stages included"
    arrays |= {f"weights/{name}": array for name, array in exported}
    if save:
        arrays |= _kept(facts, model, "saved")
        models = {"policy": model}
        if second:
            models["second"] = build(facts, group, facts.model_path)
            Stepper(facts, group, models["second"], lambda: None).train(TrainRequest(**requests[0]))
            arrays |= _kept(facts, models["second"], "second")
        saving.save(facts, group, models, Path(save), len(requests), 0, None)
    if group.rank == 0:
        np.savez(out, allow_pickle=False, **arrays)
        kept = [value.numel() for held in state.held_parameters(model.optimizer).values() for value in held.state.values()]
        seen |= {"state": sum(kept), "parameters": sum(parameter.numel() for parameter in model.chunk.parameters())}
        result.write_text(json.dumps({"reports": reports, "seen": seen}))
    group.agree()


def _watch(model: Model) -> dict[str, int]:
    """Counts, from here on, of what this rank's layers and their attention compute: calls, and rows (tokens) in all of them."""
    seen = dict.fromkeys(("layer_calls", "layer_rows", "attention_calls", "attention_rows"), 0)

    def count(kind: str, output: Any) -> None:
        seen[f"{kind}_calls"] += 1
        seen[f"{kind}_rows"] += len(output[0] if isinstance(output, tuple) else output)

    for module in model.chunk.modules():
        if isinstance(module, TransformerLayer | PackedAttention):
            kind = "layer" if isinstance(module, TransformerLayer) else "attention"
            module.register_forward_hook(lambda _module, _inputs, output, kind=kind: count(kind, output))
    return seen


def _kept(facts: TrainerSpec, model: Model, prefix: str) -> dict[str, np.ndarray]:
    """All that a checkpoint has to hold."""
    arrays = {f"{prefix}/hf/{name}": tensor.float().numpy().copy() for name, tensor in export.hf_tensors(model)}
    steps = state.steps_taken(model)
    for slot in (*(() if steps is None else state.SLOTS[facts.optimizer.kind]), state.WEIGHTS):
        arrays |= {f"{prefix}/{slot}/{name}": tensor.numpy().copy() for name, tensor in state.state_tensors(model, slot)}
    return arrays | {f"{prefix}/steps": np.array(-1 if steps is None else steps)}


def trainer(spec_path: str, log: str) -> dict[str, Any]:
    """`python -m trainer.main`, without the seconds of its imports. The answer is its pid."""

    def run() -> int:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        return main.main(["--spec", spec_path])

    return {"pid": _fork(run)}


ended: dict[int, int] = {}


def wait(pid: int) -> dict[str, Any]:
    """How a trainer ended; may be asked again."""
    if pid not in ended:
        ended[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {"code": ended[pid]}


def _fork(run: Callable[[], int | None]) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        main.die_with_parent(os.getppid())
        os.close(0)
        code = run() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def forked(job: Callable[..., dict[str, Any]], arguments: dict[str, Any]) -> dict[str, Any]:
    """So that this process itself never runs autograd, and may fork again."""
    reading, writing = os.pipe()

    def run() -> None:
        with os.fdopen(writing, "w") as file:
            json.dump(job(**arguments), file)

    pid = _fork(run)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise RuntimeError(f"{job.__name__} ended with {code}")
    answer: dict[str, Any] = json.loads(text)
    return answer


def serve() -> None:
    jobs: dict[str, Callable[..., dict[str, Any]]] = {"layout": layout, "trainer": trainer, "wait": wait}
    computing: dict[str, Callable[..., dict[str, Any]]] = {"make_models": make_models, "reference": reference}
    for line in sys.stdin:
        job = json.loads(line)
        try:
            name, arguments = job["name"], job["arguments"]
            answer = forked(computing[name], arguments) if name in computing else jobs[name](**arguments)
        except (RuntimeError, OSError, KeyError) as error:
            answer = {"error": repr(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
    os._exit(0)
