"""The hand-written forward pass against transformers, and its independence of neighbours."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from rollout.engine.config import read_config
from rollout.engine.model import KVCache, Model
from rollout.engine.weights import load_checkpoint

EXPERTS: dict[str, object] = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
TOKENS = 48
PROMPTS = [[5, 99, 17, 200, 3, 44, 44, 8], [7], [2, 1, 0, 258], list(range(30, 60))]


def load(directory: Path, dtype: torch.dtype = torch.float32) -> tuple[Model, KVCache]:
    config = read_config(directory)
    model = Model(config, dtype, TOKENS)
    load_checkpoint(model, directory)
    return model, KVCache(config, 8, TOKENS, dtype)


def reference(directory: Path) -> Callable[[list[int]], torch.Tensor]:
    """ids → transformers' logits [len(ids), vocab]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return lambda ids: model(torch.tensor([ids])).logits[0]


def decode_all(model: Model, cache: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """Logits [len(ids), vocab], one position at a time, in row 0."""
    states = [model.decode(cache[:, :, :1], torch.tensor([token]), torch.tensor([place])) for place, token in enumerate(ids)]
    return model.logits(torch.cat(states))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Qwen3", {}),
        ("Qwen3", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "hidden_size": 128}),
        ("Llama", {}),
        ("Llama", {"attention_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": True}),
        ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}}),
        ("Qwen3Moe", EXPERTS),
        ("Qwen3Moe", EXPERTS | {"norm_topk_prob": False, "decoder_sparse_step": 2}),  # its first layer is dense
    ],
)
@torch.inference_mode()
def test_logits_are_those_of_transformers(checkpoints: Callable[..., Path], kind: str, changes: dict[str, object]) -> None:
    directory = checkpoints(kind, **changes)
    model, cache = load(directory)
    assert cache.data is not None
    logits = reference(directory)
    for ids in PROMPTS:
        expected = logits(ids)
        prefilled = model.logits(model.prefill(cache.data[:, :, :1], torch.tensor([ids]))[0])
        torch.testing.assert_close(prefilled, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(decode_all(model, cache.data, ids), expected, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_m3_a_row_does_not_feel_its_neighbours_whatever_their_lengths(checkpoints: Callable[..., Path]) -> None:
    model, cache = load(checkpoints("Qwen3"))
    assert cache.data is not None
    longest = max(map(len, PROMPTS))
    padded = torch.tensor([ids + [11] * (longest - len(ids)) for ids in PROMPTS])
    together = model.prefill(cache.data[:, :, : len(PROMPTS)], padded)
    nexts = torch.tensor([9, 8, 7, 6])
    step = model.decode(cache.data[:, :, : len(PROMPTS)], nexts, torch.tensor([len(ids) for ids in PROMPTS]))
    alone, fresh = load(checkpoints("Qwen3"))
    assert fresh.data is not None
    for row, ids in enumerate(PROMPTS):
        expected = decode_all(alone, fresh.data, [*ids, int(nexts[row])])
        torch.testing.assert_close(model.logits(together[row, : len(ids)]), expected[:-1], atol=1e-5, rtol=0)
        torch.testing.assert_close(model.logits(step[row : row + 1])[0], expected[-1], atol=1e-5, rtol=0)


@torch.inference_mode()
def test_bfloat16_is_near_float32(checkpoints: Callable[..., Path]) -> None:
    (exact, cache), (coarse, small_cache) = load(checkpoints("Llama")), load(checkpoints("Llama"), torch.bfloat16)
    assert cache.data is not None and small_cache.data is not None
    ids = torch.tensor([PROMPTS[0]])
    precise = exact.logits(exact.prefill(cache.data[:, :, :1], ids)[0]).log_softmax(-1)
    rough = coarse.logits(coarse.prefill(small_cache.data[:, :, :1], ids)[0]).log_softmax(-1)
    assert 0 < (precise - rough).abs().max() < 0.3


def test_tied_embeddings_are_one_weight_and_an_untied_head_another(checkpoints: Callable[..., Path]) -> None:
    assert "lm_head.weight" not in load(checkpoints("Qwen3"))[0].weights
    assert "lm_head.weight" in load(checkpoints("Llama"))[0].weights


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM.*give it one of Qwen3ForCausalLM"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type = 'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ],
)
def test_a_model_that_is_not_computed_is_refused_by_name(
    checkpoints: Callable[..., Path], tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    shutil.copytree(checkpoints("Qwen3"), tmp_path, dirs_exist_ok=True)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(ValueError, match=says):
        read_config(tmp_path)


def test_rope_theta_is_found_where_older_versions_wrote_it(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    raw = json.loads((checkpoints("Qwen3") / "config.json").read_text())
    del raw["rope_parameters"]
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text(json.dumps(raw | {"rope_theta": 5000.0, "rope_scaling": None, "eos_token_id": [2, 7]}))
    config = read_config(tmp_path)
    assert config.rope_theta == 5000.0
    assert config.eos_ids == {2, 7}


def test_a_checkpoint_that_lacks_a_weight_or_is_another_model_changes_nothing(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    model, _ = load(checkpoints("Llama"))
    before = model.weights["model.norm.weight"].clone()
    with pytest.raises(ValueError, match="the engine runs a LlamaForCausalLM"):
        load_checkpoint(model, checkpoints("Qwen3"))
    with pytest.raises(ValueError, match="arrived as"):
        load_checkpoint(model, checkpoints("Llama", seed=1, intermediate_size=32))
    with pytest.raises(ValueError, match=r"lacks 1 weights .*lm_head"):
        load_checkpoint(model, checkpoints("Llama", seed=1, tie_word_embeddings=True))
    shutil.copytree(checkpoints("Llama"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match="cannot be read"):
        load_checkpoint(model, tmp_path)
    assert torch.equal(model.weights["model.norm.weight"], before)
