"""`headrace selfcheck loss`: which functions it passes, which it does not, and what it says about them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from driver.selfcheck import command
from tests.trainer.steps import ADAM, dealt
from trainer.loss import REGISTRY, Tokens, ppo_clip
from trainer.loss_spec import KLSpec, LossSpec
from trainer.own_loss import resolve
from trainer.selfcheck_splits import COMPANY, CUT, KEPT, LIMIT, NOTHING, PLACE, Finding, check, draw, error
from trainer.spec import TrainerSpec

ROOT = Path(__file__).parents[2]
EXAMPLE = f"{ROOT}/examples/own_loss/loss.py:soft_clip"
OWN = LossSpec(policy="my.py:loss", params={"scale": 1.0})
SPECS = {
    "ppo_clip": LossSpec(kl={"coefficient": 0.1}, entropy_bonus=0.01),  # type: ignore[arg-type]
    "dual_clip": LossSpec(policy="dual_clip", dual_clip=1.3, aggregation="constant", divisor=50.0),
    "gspo": LossSpec(policy="gspo", clip_low=3e-4, clip_high=4e-4, aggregation="sequence_mean_token_mean"),
    "cispo": LossSpec(policy="cispo", aggregation="sequence_mean_token_sum", sequence="trajectory"),
    "decoupled_ppo": LossSpec(policy="decoupled_ppo", old_log_probs="recomputed"),
    "soft_clip": LossSpec(policy=EXAMPLE, params={"width": 0.1}),
}


def ppo(tokens: Tokens) -> torch.Tensor:
    return -tokens.advantage * torch.exp(tokens.log_probs - tokens.old)


def worst(policy: Any, spec: LossSpec = OWN) -> Finding | None:
    """The first check that does not hold: the one whose cause is told."""
    return next((finding for finding in check(policy, spec, 12, seed=1) if not finding.ok), None)


@pytest.mark.parametrize("name", SPECS)
def test_M1_M2_our_own_losses_and_the_example_s_are_invariant(name: str) -> None:
    assert worst(resolve(SPECS[name]), SPECS[name]) is None


def test_a_row_mean_that_goes_through_row_means_is_invariant() -> None:
    assert worst(lambda tokens, spec: ppo(tokens) * torch.exp(tokens.row_means(tokens.old - tokens.log_probs))) is None


def test_N1_a_mean_over_the_micro_batch_is_found_by_splitting_it() -> None:
    found = worst(lambda tokens, spec: ppo(tokens) / max(1, len(tokens.row)))
    assert found is not None and found.cause == COMPANY and "let the aggregation divide" in COMPANY
    assert found.what == "split into micro-batches" and found.error > 0.1


def test_a_reduction_over_a_row_of_this_rank_s_tokens_is_found_by_cutting_rows() -> None:
    def own_row_mean(tokens: Tokens, spec: LossSpec) -> torch.Tensor:
        sums = torch.zeros(len(tokens.row_tokens), dtype=torch.float64).index_add(0, tokens.row, tokens.log_probs - tokens.old)
        return -tokens.advantage * torch.exp(sums / tokens.row_tokens.clamp(min=1))[tokens.row]

    found = worst(own_row_mean)
    assert found is not None and found.cause == CUT and "tokens.row_means" in CUT
    assert found.what == "rows on two context-parallel ranks"


def test_a_position_a_random_number_and_a_mean_over_nothing_are_told_apart() -> None:
    calls: list[int] = []

    def remembers(tokens: Tokens, spec: LossSpec) -> torch.Tensor:
        calls.append(1)
        return ppo(tokens) * len(calls)

    causes = {
        PLACE: lambda tokens, spec: ppo(tokens) * torch.arange(1, len(tokens.row) + 1),
        KEPT: remembers,
    }
    for cause, policy in causes.items():
        found = worst(policy)
        assert found is not None and found.cause == cause
    nothing = worst(lambda tokens, spec: ppo(tokens) if len(tokens.row) else ppo(tokens) + tokens.log_probs.mean())
    assert nothing is None or nothing.cause == NOTHING


def test_a_gradient_that_differs_is_found_though_every_loss_is_the_same() -> None:
    def same_values(tokens: Tokens, spec: LossSpec) -> torch.Tensor:
        own = tokens.log_probs - tokens.log_probs.detach()
        return ppo(tokens).detach() + own * len(tokens.row)

    found = worst(same_values)
    assert found is not None and found.cause == COMPANY


def test_a_function_that_asks_for_row_means_only_where_it_has_tokens_would_hang_and_is_refused() -> None:
    def sometimes(tokens: Tokens, spec: LossSpec) -> torch.Tensor:
        return ppo(tokens) * tokens.row_means(tokens.advantage) if len(tokens.row) % 2 else ppo(tokens)

    with pytest.raises(ValueError, match="would wait for each other"):
        check(sometimes, OWN, 12, 1)


def test_what_a_function_raises_is_said_with_the_micro_batch_that_made_it_raise() -> None:
    with pytest.raises(ValueError, match="failed on a micro-batch without tokens, which a rank without rows runs: RuntimeError"):
        check(lambda tokens, spec: ppo(tokens) / tokens.advantage.abs().max(), OWN, 12, 1)


def test_the_made_up_rows_are_on_both_sides_of_the_clip_and_masked_positions_hold_no_number() -> None:
    for spec in (LossSpec(), SPECS["gspo"]):
        rows = draw(np.random.default_rng(0), spec, 40)
        ratios = torch.cat([(row.columns["log_probs"] - row.columns["old"])[row.mask].exp() for row in rows])
        inside = (ratios > 1 - spec.clip_low) & (ratios < 1 + spec.clip_high)
        assert 0.1 < float(inside.double().mean()) < 0.6 and bool((ratios > 1 + spec.clip_high).any()) and bool((ratios < 1).any())
        assert all(bool(row.columns[name][~row.mask].isnan().all()) for row in rows for name in row.columns)
        assert {0.0} < {row.advantage for row in rows} and len({row.trajectory for row in rows}) < 40
        assert any(not row.mask.any() for row in rows) and {row.advantage > 0 for row in rows} == {True, False}


def test_an_error_that_is_not_a_number_is_no_small_error() -> None:
    expected = {"the loss": torch.ones(1), "a gradient": torch.ones(2)}
    assert error(expected | {"the loss": torch.full((1,), torch.nan)}, expected) == float("inf")
    assert error(expected | {"the loss": torch.full((1,), 1.5)}, expected | {"the loss": torch.zeros(1)}) == 1.5, "it is a sum that cancels"
    assert not Finding("", float("nan"), LIMIT, "").ok


TRAPS = """
import sys
import torch

def one_by_one(tokens, spec):
    return torch.stack([-a * log_prob for a, log_prob in zip(tokens.advantage, tokens.log_probs)])

def own_bonus(tokens, spec):
    return -tokens.advantage * torch.exp(tokens.log_probs - tokens.old) - 0.01 * tokens.entropy

def by_entropy(tokens, spec):
    return -tokens.advantage * torch.exp(tokens.log_probs - tokens.old) * tokens.entropy.detach()

def leaves(tokens, spec):
    sys.exit(0)
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("one_by_one", "failed on a micro-batch without tokens, which a rank without rows runs: RuntimeError"),
        ("own_bonus", "has a gradient in tokens.entropy, .* set loss.entropy_bonus"),
        ("leaves", "failed on three made-up tokens: SystemExit"),
    ],
)
def test_M4_what_would_fail_or_fall_silent_in_some_later_step_is_refused_when_the_function_is_first_tried(
    tmp_path: Path, name: str, words: str
) -> None:
    (tmp_path / "traps.py").write_text(TRAPS)
    with pytest.raises(ValueError, match=words):
        resolve(LossSpec(policy=f"{tmp_path}/traps.py:{name}"))


def test_the_entropy_may_be_used_as_a_number_and_where_there_is_a_bonus_with_its_gradient(tmp_path: Path) -> None:
    (tmp_path / "traps.py").write_text(TRAPS)
    for spec in (
        LossSpec(policy=f"{tmp_path}/traps.py:by_entropy"),
        LossSpec(policy=f"{tmp_path}/traps.py:own_bonus", entropy_bonus=0.01),
    ):
        assert worst(resolve(spec), spec) is None


def test_a_file_that_exits_when_it_is_imported_has_not_passed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAPS + "\nsys.exit(0)\n")
    done = selfcheck(f"{tmp_path}/script.py:by_entropy", "--no-layouts")
    assert done.returncode == 2 and "cannot be imported: SystemExit" in done.stderr


# ---- trained with ------------------------------------------------------------------------------------------------------

MINE = """
import torch

def loss(tokens, spec):
    low, high = spec.params["low"], spec.params["high"]
    ratio = torch.exp(tokens.log_probs - tokens.old)
    made = torch.maximum(-tokens.advantage * ratio, -tokens.advantage * ratio.clamp(1.0 - low, 1.0 + high))
    return made, ((tokens.advantage > 0) & (ratio > 1.0 + high)) | ((tokens.advantage < 0) & (ratio < 1.0 - low))
"""


def test_a_function_of_the_user_s_that_is_ppo_clip_trains_bit_for_bit_as_ppo_clip(
    lab: Any, rows: Any, make_spec: Callable[..., TrainerSpec], plan: Any, tmp_path: Path
) -> None:
    (tmp_path / "my.py").write_text(MINE)
    requests = [plan(0, [dealt(rows.ragged(71, 8), 2, 3)]), plan(1, [dealt(rows.ragged(72, 7), 2, 2)])]
    ours = lab.layout(make_spec(dp=2, loss={"clip_low": 0.1, "clip_high": 0.2}, optimizer=ADAM), requests)
    own = {"policy": f"{tmp_path}/my.py:loss", "params": {"low": 0.1, "high": 0.2}}
    mine = lab.layout(make_spec(dp=2, loss=own, optimizer=ADAM), requests)
    assert all(np.array_equal(array, ours.arrays[name]) for name, array in mine.named("weights").items())
    assert [r["clip_fraction"] for r in mine.reports] == [r["clip_fraction"] for r in ours.reports] and ours.reports[1]["clip_fraction"] > 0
    other = lab.layout(make_spec(dp=2, loss=own | {"params": {"low": 0.1, "high": 0.3}}, optimizer=ADAM), requests)
    assert other.error(ours, "weights") > 1e-6, "the params arrive"


# ---- by the command line -----------------------------------------------------------------------------------------------

BROKEN = """
import torch

def mean_of_means(tokens, spec):
    return -tokens.advantage * torch.exp(tokens.log_probs - tokens.old) / max(1, len(tokens.row))

def detached(tokens, spec):
    return -tokens.advantage * torch.exp(tokens.log_probs - tokens.old).detach()

def of_the_rank(tokens, spec):
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    return -tokens.advantage * torch.exp(tokens.log_probs - tokens.old) * (1 + rank)

def one_number(tokens, spec):
    return (-tokens.advantage * torch.exp(tokens.log_probs - tokens.old)).mean()
"""


def selfcheck(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    argv = [sys.executable, "-P", "-m", "driver.cli", "selfcheck", "loss", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=110, env=environment)


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("mean_of_means", 1, COMPANY),
        ("detached", 2, "has no gradient in tokens.log_probs: return a loss computed from them, not detached"),
        ("one_number", 2, "gave losses of () for 3 tokens: it must give one for each"),
        ("absent", 2, "has no function absent"),
    ],
)
def test_a_broken_function_ends_with_its_exit_code_and_what_to_do(tmp_path: Path, name: str, code: int, words: str) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    done = selfcheck(f"{tmp_path}/broken.py:{name}", "--rows", "8")
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr and "Traceback" not in done.stderr
    assert (f"error policy {tmp_path}/broken.py:{name}" in done.stderr or "error the policy loss" in done.stderr) == (code == 2)


def test_without_layouts_the_example_passes_in_float64(tmp_path: Path) -> None:
    done = selfcheck(EXAMPLE, "--no-layouts", "--set", "params.width=1e-1", "--set", "kl.coefficient=0.1")
    assert done.returncode == 0, done.stderr
    assert "is invariant in float64; the layouts were not asked for" in done.stdout
    assert "rows on two context-parallel ranks" in done.stdout and "tensor-parallel" not in done.stdout


@pytest.mark.slow
def test_M2_a_loss_of_ours_passes_through_every_layout_of_two_ranks_and_leaves_nothing_behind(tmp_path: Path) -> None:
    argv = command("gspo", None, ["clip_low=3e-4", "clip_high=4e-4"], rows=12, seed=0, layouts=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "TMPDIR": str(tmp_path)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        stdout, stderr = process.communicate(timeout=110)
    assert process.returncode == 0 and stderr == "", stdout + stderr
    assert sum(line.rstrip().endswith(" ok") for line in stdout.splitlines()) == 11 and "2 context-parallel ranks" in stdout
    assert not list(Path("/dev/shm").glob(f"headrace-selfcheck-{process.pid}-*"))
    assert not list(tmp_path.glob("headrace-selfcheck-*"))


@pytest.mark.slow
def test_M2_a_function_that_only_a_layout_breaks_is_found_by_it(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    done = selfcheck(f"{tmp_path}/broken.py:of_the_rank", "--rows", "8")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "is not invariant: 2 tensor-parallel ranks changes the numbers" in done.stdout
    assert "has asked for something else than tokens and spec" in done.stdout
    failed = [line for line in done.stdout.splitlines() if line.rstrip().endswith("differs")]
    assert len(failed) == 4, "every layout of two ranks, and no split"


def test_every_policy_of_ours_is_in_the_selfcheck_s_tests() -> None:
    assert REGISTRY.keys() <= SPECS.keys() and resolve(SPECS["ppo_clip"]) is ppo_clip
    assert json.loads(SPECS["soft_clip"].model_dump_json())["params"] == {"width": 0.1}


def test_a_function_that_asks_for_a_reference_where_none_is_loaded_is_told_how_to_have_one(tmp_path: Path) -> None:
    (tmp_path / "near.py").write_text("def loss(tokens, spec):\n    return (tokens.log_probs - tokens.reference) ** 2\n")
    with pytest.raises(ValueError, match=r"tokens.reference is None: set loss.kl.reference"):
        resolve(LossSpec(policy=f"{tmp_path}/near.py:loss"))
    resolve(LossSpec(policy=f"{tmp_path}/near.py:loss", kl=KLSpec(reference=tmp_path)))


@pytest.mark.slow
def test_a_loss_that_looks_at_the_reference_is_checked_in_every_layout_with_one(tmp_path: Path) -> None:
    (tmp_path / "near.py").write_text("def loss(tokens, spec):\n    return (tokens.log_probs - tokens.reference) ** 2\n")
    done = selfcheck(f"{tmp_path}/near.py:loss", "--rows", "8", "--set", f"kl.reference={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 tensor-parallel ranks" in done.stdout
