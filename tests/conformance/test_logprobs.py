"""The numbers: tokens and log-probs against plain transformers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from .lab import PROMPT, Server

TOLERANCE = 1e-4
Reference = Callable[[list[int], float], torch.Tensor]


@pytest.fixture(scope="module")
def reference(checkpoints: tuple[Path, Path]) -> Reference:
    """Log-probs [length, vocabulary] at a temperature; row i is of the token after position i."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoints[0], dtype=torch.float32)

    def log_probs(ids: list[int], temperature: float) -> torch.Tensor:
        with torch.no_grad():
            return (model(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)

    return log_probs


def of_output(reference: Reference, prompt: list[int], ids: list[int], temperature: float) -> list[float]:
    found = reference(prompt + ids, temperature)
    return [found[len(prompt) - 1 + place, token].item() for place, token in enumerate(ids)]


@pytest.mark.parametrize("prompt", [PROMPT, [7], list(range(3, 60))])
def test_m3_greedy_tokens_and_log_probs_are_those_of_transformers(engine: Server, reference: Reference, prompt: list[int]) -> None:
    reply = engine.generate(prompt, max_new_tokens=16)
    ids, pairs = reply["output_ids"], reply["meta_info"]["output_token_logprobs"]
    wanted: list[int] = []
    while len(wanted) < 16:
        wanted.append(int(reference(prompt + wanted, 1.0)[-1].argmax()))
    assert ids == wanted
    assert [pair[1:] for pair in pairs] == [[token, None] for token in ids]
    assert [pair[0] for pair in pairs] == pytest.approx(of_output(reference, prompt, ids, 1.0), abs=TOLERANCE)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_m5_log_probs_are_of_the_distribution_scaled_by_the_temperature(engine: Server, reference: Reference, temperature: float) -> None:
    reply = engine.generate(temperature=temperature, max_new_tokens=16)
    found = [pair[0] for pair in reply["meta_info"]["output_token_logprobs"]]
    assert found == pytest.approx(of_output(reference, PROMPT, reply["output_ids"], temperature), abs=TOLERANCE)


def test_m5_cutting_the_distribution_does_not_change_the_log_probs(engine: Server, reference: Reference) -> None:
    reply = engine.generate(temperature=0.7, top_p=0.8, top_k=20, max_new_tokens=16)
    found = [pair[0] for pair in reply["meta_info"]["output_token_logprobs"]]
    assert found == pytest.approx(of_output(reference, PROMPT, reply["output_ids"], 0.7), abs=TOLERANCE)


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_prompt_log_probs_start_where_asked_and_the_first_is_null(engine: Server, reference: Reference, temperature: float) -> None:
    """Of the plain distribution, whatever the temperature: it scales only what was sampled."""
    expected = reference(PROMPT, 1.0)
    for start in (0, 2, 4, 5):
        top = {"logprob_start_len": start, "top_logprobs_num": 2}
        meta = engine.generate(temperature=temperature, max_new_tokens=1, top=top)["meta_info"]
        pairs = meta["input_token_logprobs"]
        assert [pair[1] for pair in pairs] == PROMPT[start:]
        assert [pair[0] for pair in pairs[:1]] == [None] * len(pairs[:1])
        wanted = [expected[place - 1, PROMPT[place]].item() for place in range(start + 1, len(PROMPT))]
        assert [pair[0] for pair in pairs[1:]] == pytest.approx(wanted, abs=TOLERANCE)
        assert len(meta["input_top_logprobs"]) == len(pairs)
        for place, tops in enumerate(meta["input_top_logprobs"][1:], start):
            assert [pair[1] for pair in tops] == expected[place].topk(2).indices.tolist()


def test_without_a_start_there_are_no_prompt_log_probs(engine: Server) -> None:
    assert engine.generate(max_new_tokens=1)["meta_info"]["input_token_logprobs"] == []


def test_the_best_tokens_of_each_position_are_told(engine: Server, reference: Reference) -> None:
    reply = engine.generate(temperature=0.7, max_new_tokens=4, top={"top_logprobs_num": 3})
    tops = reply["meta_info"]["output_top_logprobs"]
    expected = reference(PROMPT + reply["output_ids"], 0.7)[len(PROMPT) - 1 :]
    for row, found in zip(expected, tops, strict=False):
        best = row.topk(3)
        assert [pair[1] for pair in found] == best.indices.tolist()
        assert [pair[0] for pair in found] == pytest.approx(best.values.tolist(), abs=TOLERANCE)


def test_m3_a_crowd_and_a_lonely_request_get_the_same_tokens(engine: Server) -> None:
    prompts = [PROMPT[: 1 + i % 5] + list(range(3, 3 + i)) for i in range(16)]
    alone = [engine.generate(prompt, max_new_tokens=10) for prompt in prompts]
    crowd = list(engine.background.map(lambda prompt: engine.generate(prompt, max_new_tokens=10), prompts))
    for one, other in zip(alone, crowd, strict=True):
        assert one["output_ids"] == other["output_ids"]
        first, second = (reply["meta_info"]["output_token_logprobs"] for reply in (one, other))
        assert [pair[0] for pair in first] == pytest.approx([pair[0] for pair in second], abs=TOLERANCE)
