"""verl's own functions, asked by `benchmarks/plan.py`: run with the Python of an environment that has verl (`make verl`).

One JSON line in, one out: what was asked, `rounds` times, and the median of the CPU seconds it took.

    {"work": [..], "parts": k, "equal": bool}                 the partitions of `get_seqlen_balanced_partitions`
    {"lengths": [..], "budget": tokens, "at_least": m}        the micro-batches of `rearrange_micro_batches`; m may be null
"""

import json
import statistics
import sys
import time

import torch
from tensordict import TensorDict
from verl.utils import seqlen_balancing


def timed(function, rounds):
    seconds = []
    for _ in range(rounds):
        began = time.process_time()
        try:
            found = function()
        except (AssertionError, ValueError) as error:
            return {"refused": str(error)}
        seconds.append(time.process_time() - began)
    return {"found": found, "seconds": statistics.median(seconds)}


def answer(asked):
    if "parts" in asked:
        ask = lambda: seqlen_balancing.get_seqlen_balanced_partitions(asked["work"], asked["parts"], asked["equal"])  # noqa: E731
    else:
        rows = [torch.zeros(length, dtype=torch.int8) for length in asked["lengths"]]
        batch = TensorDict({"input_ids": torch.nested.nested_tensor(rows, layout=torch.jagged)}, batch_size=[len(rows)])
        limits = {"max_token_len": asked["budget"], "min_num_micro_batch": asked["at_least"]}
        ask = lambda: seqlen_balancing.rearrange_micro_batches(batch, **limits)[1]  # noqa: E731
    return timed(ask, asked["rounds"])


for line in sys.stdin:
    print(json.dumps(answer(json.loads(line))), flush=True)
