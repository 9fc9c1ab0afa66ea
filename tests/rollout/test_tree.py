"""Trees of turns become rows: every sampled token is trained once, in the right place, under the version that made it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.tree import Trajectory, row_columns
from rollout.version import Version, parse_version
from store.rows import packed
from store.schema import validate


@st.composite
def trajectories(draw) -> Trajectory:
    """Random trees. Each token id is unique in the trajectory; a sampled token t has the log-prob -t, so misplacement shows."""
    trajectory, token = Trajectory(), 1
    size = draw(st.integers(1, 12))
    for number in range(size):
        parent = draw(st.integers(0, number - 1)) if number else None
        length = draw(st.integers(0 if number else 1, 4))
        ids = list(range(token, token + length))
        token += length
        if number and draw(st.booleans()):
            cut = draw(st.integers(0, length))
            spans = [(f"run/0/{number}/1", 0, cut), (f"run/0/{number + 1}/1", cut, length)]
            spans = [span for span in spans if span[1] < span[2]]
            trajectory.add("assistant", ids, parent=parent, log_probs=[-float(t) for t in ids], spans=spans, policy="policy")
        else:
            trajectory.add("user", ids, parent=parent)
    return trajectory


def sampled_tokens(trajectory: Trajectory) -> list[int]:
    return sorted(t for turn in trajectory.turns if turn.policy is not None for t in turn.token_ids)


@given(trajectories())
def test_N8_every_sampled_token_is_trained_exactly_once_over_the_leaves(trajectory):
    trained = []
    for leaf in trajectory.leaves():
        row = row_columns(leaf, 1.0)
        trained += row["input_ids"][1:][row["response_mask"] == 1].tolist()
    assert sorted(trained) == sampled_tokens(trajectory)


@given(trajectories())
def test_N8_a_token_is_trained_in_the_first_leaf_that_holds_it(trajectory):
    seen: set[int] = set()
    for leaf in trajectory.leaves():
        row = row_columns(leaf, 1.0)
        ids = row["input_ids"].tolist()
        masked_in = set(row["input_ids"][1:][row["response_mask"] == 1].tolist())
        assert masked_in == (set(ids) & set(sampled_tokens(trajectory))) - seen
        seen |= set(ids)


@given(trajectories())
def test_M5_position_i_of_a_row_speaks_of_input_id_i_plus_1(trajectory):
    for leaf in trajectory.leaves():
        row = row_columns(leaf, 1.0)
        for i, mask in enumerate(row["response_mask"]):
            assert row["rollout_log_probs"][i] == (-float(row["input_ids"][i + 1]) if mask else 0.0)


@given(trajectories())
def test_V5_each_sampled_token_keeps_the_version_that_made_it(trajectory):
    made_by = {
        token: parse_version(text).version
        for turn in trajectory.turns
        for text, start, end in turn.spans
        for token in turn.token_ids[start:end]
    }
    for leaf in trajectory.leaves():
        row = row_columns(leaf, 1.0)
        said = {}
        for _, version, start, end in row["version_spans"].tolist():
            said |= dict.fromkeys(row["input_ids"][1 + start : 1 + end].tolist(), version)
        assert said == {token: made_by[token] for token in row["input_ids"].tolist() if token in made_by}


@given(trajectories(), st.floats(0.1, 2.0))
def test_rows_are_what_the_store_calls_a_rollout_hop(trajectory, temperature):
    for leaf in trajectory.leaves():
        row = row_columns(leaf, temperature)
        validate("rollout", packed([row]))
        assert row["input_ids"].tolist() == leaf.token_ids


@given(trajectories())
def test_leaves_are_all_root_to_leaf_paths_in_tree_order(trajectory):
    parents = {turn.parent for turn in trajectory.turns}
    leaves = trajectory.leaves()
    number_of = {id(turn): number for number, turn in enumerate(trajectory.turns)}
    ends = [number_of[id(leaf.turns[-1])] for leaf in leaves]
    assert sorted(ends) == [number for number in range(len(trajectory.turns)) if number not in parents]
    paths = []
    for end in ends:
        path: list[int] = []
        at: int | None = end
        while at is not None:
            path.insert(0, at)
            at = trajectory.turns[at].parent
        paths.append(path)
    assert paths == sorted(paths), "children come in the order in which they were added"
    assert [leaf.index for leaf in leaves] == list(range(len(leaves)))


def single() -> Trajectory:
    trajectory = Trajectory()
    trajectory.add("user", [10, 11, 12])
    spans = [("run/2/7/3", 0, 1), ("run/2/8/3", 1, 2)]
    trajectory.add("assistant", [13, 14], parent=0, log_probs=[-0.5, -0.25], spans=spans, policy="policy", finish_reason="stop")
    return trajectory


def test_a_single_turn_is_one_row():
    (leaf,) = single().leaves()
    row = row_columns(leaf, 0.7)
    assert row["input_ids"].tolist() == [10, 11, 12, 13, 14]
    assert row["response_mask"].tolist() == [0, 0, 1, 1]
    assert row["rollout_log_probs"].tolist() == [0, 0, -0.5, -0.25]
    assert row["version_spans"].tolist() == [[2, 7, 2, 3], [2, 8, 3, 4]]
    assert row["temperature"] == np.float32(0.7)
    assert leaf.finish_reason == "stop"
    assert {name: column.dtype.name for name, column in row.items()} == {
        "input_ids": "int32",
        "response_mask": "uint8",
        "rollout_log_probs": "float32",
        "version_spans": "int64",
        "temperature": "float32",
    }


def test_N8_two_leaves_that_share_two_turns_train_them_in_the_first():
    tree = Trajectory()
    tree.add("user", [1])
    tree.add("assistant", [2], parent=0, log_probs=[-2.0], spans=[("r/0/0/1", 0, 1)], policy="policy")
    tree.add("tool", [3], parent=1)
    for token in (4, 5):
        tree.add("assistant", [token], parent=2, log_probs=[-float(token)], spans=[("r/0/1/1", 0, 1)], policy="policy")
    first, second = (row_columns(leaf, 1.0) for leaf in tree.leaves())
    assert first["response_mask"].tolist() == [1, 0, 1]
    assert second["response_mask"].tolist() == [0, 0, 1]
    assert second["rollout_log_probs"].tolist() == [0, 0, -5]
    assert second["version_spans"].tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]


def test_N9_changing_a_list_after_it_was_given_changes_no_turn():
    ids, tree = [1, 2], Trajectory()
    tree.add("user", ids)
    ids.append(3)
    assert tree.turns[0].token_ids == (1, 2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "default",
        "run/0/1",
        "run/0/1/2/3",
        "/0/1/2",
        "run/0/x/1",
        "run/0/-1/1",
        "run/0/1.0/1",
        "run/0/ 1/1",
        "run/0/01/1",
        "run/0/¹/1",
        "run/0/1/",
    ],
)
def test_A5_a_version_that_we_did_not_write_is_refused(text):
    with pytest.raises(ValueError, match="run/epoch/version/incarnation"):
        parse_version(text)
    tree = Trajectory()
    tree.add("user", [1])
    tree.add("assistant", [2], parent=0, log_probs=[-0.1], spans=[(text, 0, 1)], policy="policy")
    with pytest.raises(ValueError, match="run/epoch/version/incarnation"):
        row_columns(tree.leaves()[0], 1.0)


def test_a_version_reads_back_as_it_was_written():
    version = Version("demo", 0, 12, 3)
    assert str(version) == "demo/0/12/3"
    assert parse_version(str(version)) == version


@pytest.mark.parametrize(
    ("role", "ids", "how"),
    [
        ("assistant", [1, 2], {"policy": "p", "log_probs": [-0.1], "spans": [("r/0/0/1", 0, 2)]}),
        ("assistant", [1, 2], {"policy": "p", "log_probs": [-0.1, -0.1], "spans": [("r/0/0/1", 0, 1)]}),
        ("assistant", [1, 2], {"policy": "p", "log_probs": [-0.1, -0.1], "spans": [("r/0/0/1", 0, 2), ("r/0/1/1", 1, 2)]}),
        ("assistant", [1, 2], {"policy": "p", "log_probs": [-0.1, -0.1], "spans": [("r/0/0/1", 1, 2)]}),
        ("assistant", [1, 2], {"policy": "p", "log_probs": [-0.1, -0.1], "spans": []}),
        ("user", [1, 2], {"log_probs": [-0.1, -0.1]}),
        ("user", [1], {"parent": 7}),
        ("user", [1], {"parent": None}),
    ],
)
def test_E13_turns_that_do_not_add_up_are_refused(role, ids, how):
    tree = Trajectory()
    tree.add("user", [9])
    with pytest.raises(ValueError):
        tree.add(role, ids, **({"parent": 0} | how))
    assert len(tree.turns) == 1


def test_the_root_is_a_prompt():
    with pytest.raises(ValueError, match="the root is the prompt"):
        Trajectory().add("user", [])
    with pytest.raises(ValueError, match="the root is the prompt"):
        Trajectory().add("assistant", [1], policy="p", log_probs=[-1.0], spans=[("r/0/0/1", 0, 1)])


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_M5_a_temperature_that_cannot_be_divided_by_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature"):
        row_columns(single().leaves()[0], temperature)
