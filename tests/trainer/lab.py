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
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from store import open_store  # noqa: E402
from tests.trainer.plain import reference  # noqa: E402
from trainer import device  # noqa: E402

device.install(torch.device(sys.argv[1]))  # before megatron comes in

from trainer import export, main, models, rank, saving, state, step  # noqa: E402
from trainer.checkpoints import POLICY  # noqa: E402
from trainer.group import Group  # noqa: E402
from trainer.layers import PackedAttention, TransformerLayer  # noqa: E402
from trainer.model import Model  # noqa: E402
from trainer.routes import Routing  # noqa: E402
from trainer.rows import Row  # noqa: E402
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

    experts: dict[str, Any] = shape | {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}

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
        "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**experts, norm_topk_prob=True, rope_parameters=rope(10000.0))),
        # The first layer is dense, and the experts' weights do not sum to 1.
        "qwen3_moe_mixed": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**experts, decoder_sparse_step=2, rope_parameters=rope(10000.0))),
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


def layout(
    spec: dict[str, Any],
    requests: list[dict[str, Any]],
    out: str,
    resume: str | None = None,
    save: str | None = None,
    freeing: bool = False,
) -> dict[str, Any]:
    """The product's steps, on as many forked ranks as the spec has; from a checkpoint, into a directory of checkpoints. With `freeing` all
    rows are freed just before the first rank's optimizer steps, and `seen` says what the store then holds, and what it holds behind it."""
    facts = TrainerSpec.model_validate(spec)
    with socket.create_server(("127.0.0.1", 0)) as rendezvous:
        port = rendezvous.getsockname()[1]
    result = Path(out).with_suffix(".json")
    children = []
    for number in range(facts.world_size):
        names = {"RANK": number, "WORLD_SIZE": facts.world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        children.append(_fork(lambda names=names: _layout_rank(facts, names, requests, out, result, resume, save, freeing)))  # type: ignore[misc]
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
    freeing: bool,
) -> None:
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    device.enter()
    group = Group(facts)
    model = models.resume(facts, group, Path(resume))[0] if resume else models.begin(facts, group, facts.model_path)
    stepper = Stepper(facts, group, model, models.policy_loss(facts, group), lambda: None)
    parts = {"" if name == POLICY else f"{name}.": part for name, part in models.parts(model).items()}
    arrays = _kept(facts, parts, "resumed") if resume else {}
    _note_routes(arrays)
    if requests:
        rows = {row.row_id: row for mini in TrainRequest(**requests[0]).mini_batches for row in mini.rows()}
        arrays |= {f"log_probs/{row_id}": np.array(values) for row_id, values in stepper.log_probs(list(rows.values())).items()}
    reports = []
    seen = _watch(model)
    if freeing and group.rank == 0:
        _free_in_the_step(model, facts.store_location, requests, seen)
    for number, request in enumerate(requests):
        reports.append(stepper.train(TrainRequest(**request)).model_dump())
        if not facts.distributed_optimizer:  # there a rank has the sum of its part of the gradients only
            for prefix, part in parts.items():
                gradients = export.hf_tensors(part, lambda parameter: parameter.main_grad)  # type: ignore[attr-defined]
                arrays |= {f"gradients/{number}/{prefix}{name}": tensor.cpu().numpy().copy() for name, tensor in gradients}
    if freeing:
        seen["bytes_after"] = open_store(facts.store_location).stats().used_bytes
    exported = [
        (prefix + name, tensor.float().cpu().numpy().copy()) for prefix, part in parts.items() for name, tensor in export.hf_tensors(part)
    ]
    assert len(exported) == len(dict(exported)), "each name once, tied embeddings over pipeline stages included"
    arrays |= {f"weights/{name}": array for name, array in exported}
    if save:
        arrays |= _kept(facts, parts, "saved")
        saving.save(facts, group, models.parts(model), Path(save), len(requests), 0, None)
    if group.rank == 0:
        np.savez(out, allow_pickle=False, **arrays)
        kept = [value.numel() for held in state.held_parameters(model.optimizer).values() for value in held.state.values()]
        seen |= {"state": sum(kept), "parameters": sum(parameter.numel() for parameter in model.chunk.parameters())}
        result.write_text(json.dumps({"reports": reports, "seen": seen}))
    group.agree()


def _note_routes(arrays: dict[str, np.ndarray]) -> None:
    """Of each row that this rank opens, as it read them."""
    open_row = step.open_row

    def noting(planned: PlanRow, vocab_size: int, routing: Routing | None = None) -> Row:
        row = open_row(planned, vocab_size, routing)
        if row.routes is not None:
            arrays[f"routes/{planned.row_id}"] = row.routes.copy()
        return row

    step.open_row = noting


def _free_in_the_step(model: Model, location: str, requests: list[dict[str, Any]], seen: dict[str, int]) -> None:
    store, step = open_store(location), model.optimizer.step

    def freed_first() -> Any:
        if "bytes_in_step" not in seen:
            rows = [row for request in requests for mini in TrainRequest(**request).mini_batches for row in mini.rows()]
            store.free([row.rollout.ref() for row in rows])
            assert not store.keys(), "all rows are those of the requests"
            seen["bytes_in_step"] = store.stats().used_bytes
        return step()

    model.optimizer.step = freed_first


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


def _kept(facts: TrainerSpec, parts: dict[str, Model], when: str) -> dict[str, np.ndarray]:
    """All that a checkpoint has to hold of each model."""
    arrays: dict[str, np.ndarray] = {}
    for prefix, model in parts.items():
        arrays |= {f"{when}/hf/{prefix}{name}": tensor.float().cpu().numpy().copy() for name, tensor in export.hf_tensors(model)}
        steps = state.steps_taken(model)
        for slot in (*(() if steps is None else state.SLOTS[facts.optimizer.kind]), state.WEIGHTS):
            arrays |= {f"{when}/{slot}/{prefix}{name}": tensor.cpu().numpy().copy() for name, tensor in state.state_tensors(model, slot)}
        arrays[f"{when}/steps/{prefix}"] = np.array(-1 if steps is None else steps)
    return arrays


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
