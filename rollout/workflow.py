"""A workflow turns one task into one trajectory: `async def run(task, generate) -> Trajectory`.

It decides what is asked; `generate` decides where and how often. It knows nothing of engines, retries, gates or versions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollout.answer import Generation
from rollout.tree import Trajectory


@dataclass(frozen=True)
class Task:
    """What one trajectory starts from: the prompt in tokens, and the other fields of its dataset row."""

    prompt_ids: tuple[int, ...]
    row: Mapping[str, Any]
    policy: str = "policy"


class Generate(Protocol):
    async def __call__(self, input_ids: Sequence[int]) -> Generation:
        """The finished answer (stop or length) to these tokens."""


class WorkflowFailed(Exception):
    """Its environment broke, or a tool of it: no trajectory came of this, however many turns there were. The text is the reason."""


class Workflow(Protocol):
    async def __call__(self, task: Task, generate: Generate) -> Trajectory:
        """The whole trajectory. Raises WorkflowFailed; a trajectory that ended in the middle is never returned as if it were one."""


async def single_turn(task: Task, generate: Generate) -> Trajectory:
    """One prompt, one answer."""
    trajectory = Trajectory()
    prompt = trajectory.add("user", task.prompt_ids)
    answer = await generate(task.prompt_ids)
    trajectory.add(
        "assistant",
        answer.output_ids,
        parent=prompt,
        log_probs=answer.log_probs,
        spans=answer.spans,
        policy=task.policy,
        finish_reason=answer.finish_reason,
    )
    return trajectory
