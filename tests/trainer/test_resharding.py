"""A checkpoint of any layout continues in any other: what was held is there bit for bit, and the next step is the one it would have been.

A layout is written as its digits: tensor, pipeline, context and data parallel ranks; a `d` after them is the distributed optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.trainer.steps import ADAM, SGD, dealt
from trainer.spec import TrainerSpec

MakeSpec = Callable[..., TrainerSpec]
QUICK = [("2111", "1111"), ("2111", "1211")]
SLOW = [("2211", "1112"), ("1122", "2111"), ("1211", "2111"), ("1111", "2211"), ("2111", "2111"), ("1211", "1211"), ("2112", "2112")]


def in_words(layout: str) -> dict[str, Any]:
    sizes = dict(zip(("tp", "pp", "cp", "dp"), map(int, layout.removesuffix("d")), strict=True))
    return {**sizes, "distributed_optimizer": layout.endswith("d")}


def pairs(quick: list[tuple[str, str]], slow: list[tuple[str, str]]) -> list[Any]:
    marked = [pytest.param(*pair, marks=pytest.mark.slow, id="-".join(pair)) for pair in slow]
    return [*(pytest.param(*pair, id="-".join(pair)) for pair in quick), *marked]


def held(found: Any, prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): array for name, array in found.named(prefix).items()}


def assert_bit_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys() and found
    assert all(np.array_equal(array, expected[name]) for name, array in found.items())


@pytest.fixture
def continued(lab: Any, rows: Any, make_spec: MakeSpec, plan: Any, tmp_path: Path) -> Callable[..., tuple[Any, Any, Any]]:
    """Two steps in one layout, saved; the third there, and the third after a resume in another."""

    def run(layout: str, other: str, model: str = "qwen3_odd", experts: tuple[int, int] = (1, 1), **switches: Any) -> tuple[Any, Any, Any]:
        drawn = [[row.model_copy(update={"score": row.advantage}) for row in rows.ragged(70 + i, 8)] for i in range(3)]
        here, there = (
            make_spec(model, **{"optimizer": ADAM, **in_words(name), "ep": ep, **switches})
            for name, ep in zip((layout, other), experts, strict=True)
        )

        def plans(spec: TrainerSpec) -> list[Any]:
            return [plan(i, [dealt(some, spec.dp, 3)]).model_copy(update={"critic_lr": 1e-2}) for i, some in enumerate(drawn)]

        saved = lab.layout(here, plans(here)[:2], save=tmp_path)
        on = lab.layout(here, plans(here))
        resumed = lab.layout(there, plans(there)[2:], resume=tmp_path / "step_00000002")
        return saved, on, resumed

    return run


@pytest.mark.parametrize(("layout", "other"), pairs(QUICK, SLOW))
def test_any_layout_resumes_from_any_other_bit_for_bit_and_takes_the_step_that_was_next(continued: Any, layout: str, other: str) -> None:
    saved, on, resumed = continued(layout, other)
    assert_bit_equal(held(resumed, "resumed"), held(saved, "saved"))
    print(f"\n{layout} -> {other}: weights after the next step {resumed.error(on, 'weights'):.1e}")
    assert resumed.error(on, "weights") < 1e-5
    if layout == other:
        assert_bit_equal(held(resumed, "weights"), held(on, "weights"))


CRITIC = {"critic": {"whiten": False}, "loss": {"kl": {"coefficient": 0.05}}}


@pytest.mark.parametrize(
    ("layout", "other", "switches"),
    [
        pytest.param("2111", "1112", {}, id="2111-1112"),
        pytest.param("1211", "1211", {}, id="1211-1211", marks=pytest.mark.slow),
        pytest.param("1112d", "1211", {}, id="1112d-1211", marks=pytest.mark.slow),
        pytest.param("1111", "1111", {"dtype": "bfloat16"}, id="bf16", marks=pytest.mark.slow),
    ],
)
def test_the_critic_goes_on_as_the_policy_does(continued: Any, layout: str, other: str, switches: dict[str, Any]) -> None:
    saved, on, resumed = continued(layout, other, **CRITIC, **switches)
    assert_bit_equal(held(resumed, "resumed"), held(saved, "saved"))
    assert np.abs(saved.arrays["saved/exp_avg/critic.value_head.weight"]).max() > 0
    assert resumed.error(on, "weights") < 1e-5
    assert any(name.startswith("weights/critic.") for name in on.arrays)
    if layout == other:
        assert_bit_equal(held(resumed, "weights"), held(on, "weights"))


MIXTURE_SLOW = [("1112", "1112", 2, 2), ("1112", "2111", 2, 2), ("1112d", "1211", 2, 1), ("2112", "1112d", 4, 2), ("2111", "2112d", 2, 2)]


@pytest.mark.parametrize(
    ("layout", "other", "ep", "other_ep"),
    [
        pytest.param("1112", "1111", 2, 1, id="1112e2-1111e1"),
        *(pytest.param(*case, id=f"{case[0]}e{case[2]}-{case[1]}e{case[3]}", marks=pytest.mark.slow) for case in MIXTURE_SLOW),
    ],
)
def test_experts_are_kept_as_everything_else_is(continued: Any, layout: str, other: str, ep: int, other_ep: int) -> None:
    saved, on, resumed = continued(layout, other, model="qwen3_moe", experts=(ep, other_ep))
    assert_bit_equal(held(resumed, "resumed"), held(saved, "saved"))
    print(f"\n{layout} ep {ep} -> {other} ep {other_ep}: weights after the next step {resumed.error(on, 'weights'):.1e}")
    assert resumed.error(on, "weights") < 1e-5
    if (layout, ep) == (other, other_ep):
        assert_bit_equal(held(resumed, "weights"), held(on, "weights"))


@pytest.mark.parametrize("shard_bytes", [30_000, 1])
def test_files_of_bounded_size_and_their_index_load_in_transformers_and_resume(
    lab: Any, rows: Any, make_spec: MakeSpec, plan: Any, tmp_path: Path, shard_bytes: int
) -> None:
    """The two ranks write in turn. A tensor larger than the bound has a file of its own."""
    spec = make_spec("qwen3_odd", dp=2, optimizer=ADAM, shard_bytes=shard_bytes)
    saved = lab.layout(spec, [plan(0, [dealt(rows.ragged(80, 6), 2, 2)])], save=tmp_path)
    path = tmp_path / "step_00000001"
    for directory in (path / "hf", path / "optimizer/exp_avg"):
        index = json.loads((directory / "model.safetensors.index.json").read_text())
        files = sorted(directory.glob("*.safetensors"))
        tensors = {file.name: load_file(file) for file in files}
        assert len(files) > 2 and [file.name for file in files] == [
            f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
        ]
        assert index["weight_map"] == {tensor: name for name, there in tensors.items() for tensor in there}
        sizes = [[array.nbytes for array in there.values()] for there in tensors.values()]
        assert all(sum(there) <= shard_bytes or len(there) == 1 for there in sizes)
        assert index["metadata"]["total_size"] == sum(map(sum, sizes))
    request = plan(0, [dealt(rows.ragged(81, 6), 1, 2)])
    hf = make_spec("qwen3_odd", model_path=path / "hf")
    assert lab.layout(hf, [request]).distance(lab.reference(hf, [request]), "log_probs") < 5e-6
    assert_bit_equal(held(lab.layout(make_spec("qwen3_odd", optimizer=ADAM), [], resume=path), "resumed"), held(saved, "saved"))


SPREAD_QUICK = [("1112d", "2111")]
SPREAD_SLOW = [("2111", "1122d"), ("1112d", "1112d"), ("1122d", "1112"), ("2212d", "2212d")]


@pytest.mark.parametrize(("layout", "other"), pairs(SPREAD_QUICK, SPREAD_SLOW))
def test_state_that_is_spread_over_data_parallel_ranks_is_saved_whole_and_spread_anew(continued: Any, layout: str, other: str) -> None:
    test_any_layout_resumes_from_any_other_bit_for_bit_and_takes_the_step_that_was_next(continued, layout, other)


BF16 = {"dtype": "bfloat16"}
BF16_SLOW = [("2111", "1211"), ("1112d", "1112d"), ("2212d", "1121"), ("1121", "1112d")]


@pytest.mark.parametrize(("layout", "other"), pairs([("1111", "1111")], BF16_SLOW))
def test_bf16_resumes_from_the_fp32_weights_behind_it(continued: Any, layout: str, other: str) -> None:
    saved, on, resumed = continued(layout, other, **BF16)
    assert_bit_equal(held(resumed, "resumed"), held(saved, "saved"))
    fp32, bf16 = held(saved, "saved/weights"), held(saved, "saved/hf")
    assert any((fp32[name] != bf16[name]).any() for name in fp32), "there is something behind the rounding"
    print(f"\nbf16 {layout} -> {other}: weights after the next step {resumed.error(on, 'weights'):.1e}")
    assert resumed.error(on, "weights") < 0.05
    if layout == other:
        assert_bit_equal(held(resumed, "weights"), held(on, "weights"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1112", "1112d"])
def test_experts_in_bf16_resume_bit_for_bit(continued: Any, layout: str) -> None:
    saved, on, resumed = continued(layout, layout, model="qwen3_moe", experts=(2, 2), **BF16)
    assert_bit_equal(held(resumed, "resumed"), held(saved, "saved"))
    assert_bit_equal(held(resumed, "weights"), held(on, "weights"))


@pytest.mark.parametrize(("dtype", "other"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_run_may_change_its_dtype_between_two_starts(
    lab: Any, rows: Any, make_spec: MakeSpec, plan: Any, tmp_path: Path, dtype: str, other: str
) -> None:
    """What the optimizer steps goes on; the fp32 weights behind bf16 become the weights, or the weights what is behind them."""
    requests = [plan(0, [dealt(rows.ragged(90, 6), 1, 2)])]
    saved = lab.layout(make_spec("qwen3_odd", optimizer=ADAM, dtype=dtype), requests, save=tmp_path)
    spec = make_spec("qwen3_odd", optimizer=ADAM, dtype=other, dp=2, distributed_optimizer=True)
    resumed = lab.layout(spec, [], resume=tmp_path / "step_00000001")
    for slot in ("exp_avg", "exp_avg_sq", "weights"):
        assert_bit_equal(held(resumed, f"resumed/{slot}"), held(saved, f"saved/{slot}"))


@pytest.mark.parametrize(("layout", "other"), pairs([("2111", "1112")], [("1111", "2211"), ("2211", "2211")]))
def test_sgd_s_momentum_is_kept_as_adam_s_moments_are(continued: Any, layout: str, other: str) -> None:
    saved, on, resumed = continued(layout, other, optimizer=SGD)
    assert_bit_equal(held(resumed, "resumed"), held(saved, "saved"))
    assert resumed.error(on, "weights") < 1e-5
    assert np.abs(saved.arrays["saved/momentum_buffer/model.norm.weight"]).max() > 0


def test_before_the_first_step_there_is_no_state_to_save_and_a_resume_begins_as_a_load_does(
    lab: Any, rows: Any, make_spec: MakeSpec, plan: Any, tmp_path: Path
) -> None:
    spec, other = make_spec("qwen3_odd", optimizer=ADAM, tp=2), make_spec("qwen3_odd", optimizer=ADAM)
    lab.layout(spec, [], save=tmp_path)
    path = tmp_path / "step_00000000"
    assert not (path / "optimizer").exists()
    request = plan(0, [dealt(rows.ragged(82, 6), 1, 2)])
    found, expected = lab.layout(other, [request], resume=path), lab.layout(other, [request])
    assert_bit_equal(held(found, "weights"), held(expected, "weights"))
