"""Make the tiny base model of the demo: a byte-level tokenizer and a two-layer Qwen3 of 427,264 parameters.

The warm-up teaches the format and never the task: each target is a uniformly random permutation of the right digits, then the end
token. The base therefore answers with the right digits in a random order, and the order is left for reinforcement learning to find.

`base/` beside this file is the output of this script and is what the demo uses. Do not rebuild it lightly: how well a run climbs
depends on the base more than on the seed of the run, and another thread count or torch build gives other weights.

    python examples/sort_digits/make_base.py [--seed 3] [--output DIR]
"""

import argparse
import importlib.util
import json
import random
from pathlib import Path
from types import ModuleType

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
PAD, BOS, EOS = 0, 1, 2
FIRST_BYTE = 3
ROPE_THETA = 10000.0
STEPS, BATCH_ROWS = 400, 64
PEAK_LR, FINAL_LR_SHARE, LR_WARMUP_STEPS = 2e-3, 0.1, 50


def byte_characters() -> list[str]:
    """The printable stand-in of each byte that byte-level BPE uses: itself where it prints, else the next free one from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    free = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(free)) for byte in range(256)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """259 tokens: three specials, then byte b as id 3 + b. No merges, no chat template, nothing added to a prompt."""
    vocabulary = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS}
    vocabulary |= {character: FIRST_BYTE + byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )


def build_model() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=FIRST_BYTE + 256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config).float()


def warmup_batch(draw_rows, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """`input_ids` and `labels`, both [B, S], right-padded; labels are -100 everywhere but on the shuffled answer and its end token."""
    sequences, labels = [], []
    for row in draw_rows(BATCH_ROWS, rng):
        digits = list(row["answer"])
        rng.shuffle(digits)
        prompt = [FIRST_BYTE + byte for byte in row["prompt"].encode()]
        target = [FIRST_BYTE + byte for byte in "".join(digits).encode()] + [EOS]
        sequences.append(prompt + target)
        labels.append([-100] * len(prompt) + target)
    width = max(map(len, sequences))
    input_ids = torch.tensor([ids + [PAD] * (width - len(ids)) for ids in sequences])
    return input_ids, torch.tensor([ids + [-100] * (width - len(ids)) for ids in labels])


def lr_at(step: int) -> float:
    """Linear up over the first steps, then linear down to a tenth."""
    if step < LR_WARMUP_STEPS:
        return PEAK_LR * (step + 1) / LR_WARMUP_STEPS
    done = (step - LR_WARMUP_STEPS) / (STEPS - LR_WARMUP_STEPS)
    return PEAK_LR * (1.0 - (1.0 - FINAL_LR_SHARE) * done)


def warm_up(model: Qwen3ForCausalLM, draw_rows, seed: int) -> None:
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.01)
    model.train()
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = lr_at(step)
        input_ids, labels = warmup_batch(draw_rows, rng)
        loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == STEPS - 1:
            print(f"warm-up step {step:3d}  loss {loss.item():.4f}", flush=True)


def edit_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values, indent=2) + "\n")


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """A plain Hugging Face checkpoint, with the two names that readers older than transformers 5 look for."""
    directory.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD, bos_token_id=BOS)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)  # written for the owner alone; a container runs as another user
    edit_json(directory / "config.json", rope_theta=ROPE_THETA)
    edit_json(directory / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


def load_data_module() -> ModuleType:
    """make_data.py of this folder, whatever the current directory is."""
    spec = importlib.util.spec_from_file_location("sort_digits_make_data", HERE / "make_data.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=3, help="3 gave the best base of the four that were tried")
    parser.add_argument("--output", type=Path, default=HERE / "base")
    options = parser.parse_args()

    torch.set_num_threads(1)  # sums in another order would be another base
    torch.manual_seed(options.seed)
    model = build_model()
    warm_up(model, load_data_module().draw_rows, options.seed)
    save(model, build_tokenizer(), options.output)
    print(f"wrote {options.output}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
