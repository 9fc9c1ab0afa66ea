"""AReaL's executor as a user would drive it: `RemoteSGLangEngine`, `RLVRWorkflow` and `prepare_batch`, against servers that are there.

Runs in AReaL's own environment (`make areal`), asked by `benchmarks.driver`, and imports nothing of ours:

    .venv-areal/bin/python -P benchmarks/areal_peer.py --addr 127.0.0.1:30000 --model DIR --running 1024 --group 8 --batch 1024 --seconds 20

Prints one line of JSON: trajectories a second, and CPU microseconds of this process and of its reward workers for each.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
import zlib
from typing import Any

from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from areal.engine import RemoteSGLangEngine
from areal.workflow.rlvr import RLVRWorkflow
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import PreTrainedTokenizerFast


def score(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **row: Any) -> float:
    """The scorer of `benchmarks.bound`."""
    return float(zlib.crc32(completion.encode()) & 1)


def prompt_ids(prompt: str, tokenizer: PreTrainedTokenizerFast, enable_thinking: bool) -> list[int]:
    return list(tokenizer.encode(prompt))


def prompt_of(row: dict[str, Any]) -> str:
    return str(row["question"])


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--addr", nargs="+", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--running", type=int, required=True, help="trajectories at once")
    parser.add_argument("--group", type=int, required=True, help="trajectories of a prompt")
    parser.add_argument("--batch", type=int, required=True, help="trajectories of a batch")
    parser.add_argument("--tokens", type=int, required=True, help="of an answer")
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    config = InferenceEngineConfig(
        backend="sglang:d1",
        max_concurrent_rollouts=options.running // options.group,
        consumer_batch_size=options.batch // options.group,
        max_head_offpolicyness=8,  # two batches in flight and six more: never what binds
    )
    engine = RemoteSGLangEngine(config)
    engine.initialize(addr=options.addr, train_data_parallel_size=1)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{options.model}/tokenizer.json", eos_token="<eos>", pad_token="<eos>")
    workflow = RLVRWorkflow(
        reward_fn=score,
        gconfig=GenerationHyperparameters(max_new_tokens=options.tokens, temperature=1.0),
        tokenizer=tokenizer,
        get_input_ids_fn=prompt_ids,
        data_extract_prompt_fn=prompt_of,
    )
    rows = [{"question": f"{number} =", "answer": ""} for number in range(100_000)]
    loader = StatefulDataLoader(rows, batch_size=config.consumer_batch_size, collate_fn=list)
    version = 0

    def batches(until: float) -> int:
        nonlocal version
        trajectories = 0
        while time.monotonic() < until:
            results = engine.prepare_batch(loader, workflow, group_size=options.group)
            trajectories += sum(len(result["rewards"]) for result in results)
            version += 1
            engine.set_version(version)
        return trajectories

    batches(time.monotonic() + options.seconds / 2)
    began, used = time.monotonic(), cpu_s()
    trajectories = batches(began + options.seconds)
    span_s = time.monotonic() - began
    print(json.dumps({"per_s": trajectories / span_s, "cpu_us": (cpu_s() - used) / trajectories * 1e6, "trajectories": trajectories}))
    engine.destroy()


if __name__ == "__main__":
    main()
