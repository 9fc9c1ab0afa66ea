"""The built-in workflow: one prompt, one answer, one row."""

from rollout.answer import Generation
from rollout.tree import row_columns
from rollout.workflow import Task, single_turn


async def test_a_single_turn_asks_once_and_becomes_one_row():
    asked = []

    async def generate(input_ids):
        asked.append(list(input_ids))
        return Generation([7, 8], [-0.5, -0.25], [("run/0/4/1", 0, 2)], "length")

    trajectory = await single_turn(Task((5, 6), {"answer": "78"}), generate)
    (leaf,) = trajectory.leaves()
    assert asked == [[5, 6]]
    assert leaf.finish_reason == "length"
    assert leaf.turns[-1].policy == "policy"
    row = row_columns(leaf, 1.0)
    assert row["input_ids"].tolist() == [5, 6, 7, 8]
    assert row["response_mask"].tolist() == [0, 1, 1]
    assert row["version_spans"].tolist() == [[0, 4, 1, 3]]
