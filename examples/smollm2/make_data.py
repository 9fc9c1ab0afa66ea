"""Write `data.jsonl`: one-digit additions and subtractions of reasoning-gym's `chain_sum`, behind three solved examples.

The prompt is plain text, not a conversation: asked in its chat format a model of this size gets nearly nothing right, behind three
examples about half, and only a task that is sometimes solved teaches anything. There are 200 different problems, so rows repeat.

    pip install reasoning-gym==0.1.25
    python examples/smollm2/make_data.py [--rows 512] [--seed 0] [--output FILE]
"""

import argparse
import json
import sys
from pathlib import Path

EXAMPLES = "4 + 3 = 7\n9 - 2 = 7\n1 - 6 = -5\n"


def rows_of(count: int, seed: int) -> list[dict[str, str]]:
    """`count` rows of {"prompt", "answer", "task_type"}; the same seed gives the same rows."""
    import reasoning_gym

    problems = reasoning_gym.create_dataset("chain_sum", size=count, seed=seed, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    return [
        {"prompt": f"{EXAMPLES}{problem['metadata']['expression']} =", "answer": problem["answer"], "task_type": "chain_sum"}
        for problem in problems
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "data.jsonl")
    options = parser.parse_args()
    try:
        rows = rows_of(options.rows, options.seed)
    except ImportError:
        sys.exit("reasoning-gym is not installed: pip install reasoning-gym==0.1.25")
    options.output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"wrote {len(rows)} rows to {options.output}")


if __name__ == "__main__":
    main()
