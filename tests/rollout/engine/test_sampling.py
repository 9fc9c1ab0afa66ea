"""Draws and log-probs: the right distribution, the right support, the same numbers in company and alone."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from rollout.engine.request import Request, Sampling
from rollout.engine.sampling import draw, seeded_gumbel

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, -3.0])
DRAWS = 2000


def request(position: int = 5, tops: int = 0, **sampling: Any) -> Request:
    return Request("rid", [1] * position, Sampling(max_new_tokens=9, **sampling), stream=False, return_logprob=True, top_logprobs_num=tops)


def shares(**sampling: Any) -> list[float]:
    """How often each of the five tokens is drawn; seeded draws take one position after the other."""
    requests = [request(position, **sampling) for position in range(DRAWS)]
    drawn = draw(LOGITS.repeat(DRAWS, 1), requests, torch.Generator().manual_seed(0))
    return [drawn.tokens.count(token) / DRAWS for token in range(5)]


@pytest.mark.parametrize("seed", [None, 11])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_tokens_are_drawn_from_the_scaled_distribution(temperature: float, seed: int | None) -> None:
    expected = (LOGITS / temperature).softmax(0).tolist()
    assert shares(temperature=temperature, seed=seed) == pytest.approx(expected, abs=0.04)


@pytest.mark.parametrize("seed", [None, 11])
@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.7}, {0, 1}),
        ({"top_p": 0.5}, {0}),
        ({"min_p": 0.2}, {0, 1, 2}),
        ({"top_k": 4, "min_p": 0.3}, {0, 1}),
    ],
)
def test_what_is_cut_off_is_never_drawn_and_the_rest_keeps_its_ratio(
    sampling: dict[str, float], allowed: set[int], seed: int | None
) -> None:
    probs = LOGITS.softmax(0)
    left = sum(probs[token].item() for token in allowed)
    expected = [probs[token].item() / left if token in allowed else 0.0 for token in range(5)]
    found = shares(seed=seed, **sampling)
    assert found == pytest.approx(expected, abs=0.04)
    assert all(found[token] == 0 for token in range(5) if token not in allowed)


def test_m5_log_probs_are_of_the_temperature_scaled_distribution_before_any_cut() -> None:
    drawn = draw(LOGITS.repeat(2, 1), [request(temperature=1.3, top_k=2, tops=3), request(top_k=1)], torch.Generator())
    scaled = (LOGITS / 1.3).log_softmax(0)
    assert drawn.logprobs[0] == pytest.approx(scaled[drawn.tokens[0]].item(), abs=1e-6)
    assert drawn.tops[0] is not None
    assert [pair[1] for pair in drawn.tops[0]] == [0, 1, 2]
    assert [pair[0] for pair in drawn.tops[0]] == pytest.approx(scaled[:3].tolist(), abs=1e-6)
    assert drawn.tops[1] is None
    assert drawn.tokens[1] == 0
    assert drawn.logprobs[1] == pytest.approx(LOGITS.log_softmax(0)[0].item(), abs=1e-6)


def test_a_seeded_draw_depends_on_seed_and_position_only() -> None:
    mixed = [request(3, seed=1), request(9), request(4, seed=1), request(4, seed=-5), request(2, top_k=1)]
    company = draw(LOGITS.repeat(5, 1), mixed, torch.Generator().manual_seed(3))
    for row in (0, 2, 3, 4):
        alone = draw(LOGITS[None], [mixed[row]], torch.Generator().manual_seed(77))
        assert (alone.tokens[0], alone.logprobs[0]) == (company.tokens[row], company.logprobs[row])
    assert len({tuple(seeded_gumbel([(seed, position)], 50)[0]) for seed in (0, 1, 2**63 - 1, -(2**63)) for position in (0, 1, 2)}) == 12


def test_seeded_noise_is_gumbel_and_finite() -> None:
    noise = seeded_gumbel([(7, position) for position in range(400)], 259)
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.02)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.05)
    assert abs(np.corrcoef(noise[:-1].ravel(), noise[1:].ravel())[0, 1]) < 0.02


def test_logits_that_are_not_finite_show_in_the_log_prob() -> None:
    broken = torch.stack([LOGITS, LOGITS * float("nan")])
    drawn = draw(broken, [request(), request()], torch.Generator())
    assert math.isfinite(drawn.logprobs[0])
    assert not math.isfinite(drawn.logprobs[1])
