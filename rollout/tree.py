"""A trajectory as a tree of turns, and its leaves as rows of the training batch.

Each turn is one message or one answer of a model, in tokens as they were sent or sampled: nothing is tokenized again. A history that
was rewritten is another child of the turn up to which it agrees, never a shift of tokens. Each path from the root to a leaf becomes
one row, and the tokens of a sampled turn are trained in exactly one of them, the first in tree order that holds it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rollout.version import parse_version

Span = tuple[str, int, int]


@dataclass(frozen=True)
class Turn:
    """One node. `policy` names the model that sampled it (None: it was given). Spans are (version, start, end) over its tokens."""

    role: str
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...] = ()
    spans: tuple[Span, ...] = ()
    policy: str | None = None
    parent: int | None = None
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        if self.policy is None:
            if self.log_probs or self.spans:
                raise ValueError(f"a {self.role} turn was not sampled, so it has no log-probs and no versions; name its policy if it was")
            return
        if len(self.log_probs) != len(self.token_ids):
            raise ValueError(
                f"a turn of {len(self.token_ids)} sampled tokens has {len(self.log_probs)} log-probs; each token needs its own"
            )
        edges = [0, *(end for _, _, end in self.spans)]
        if any(start != edge or end <= start for (_, start, end), edge in zip(self.spans, edges, strict=False)) or edges[-1] != len(
            self.token_ids
        ):
            raise ValueError(f"version spans {self.spans} do not cover the {len(self.token_ids)} tokens of the turn one after the other")


@dataclass(frozen=True)
class Leaf:
    """One root-to-leaf path: `turns[i]` is trained here exactly when `trained[i]`."""

    index: int
    turns: tuple[Turn, ...]
    trained: tuple[bool, ...]

    @property
    def token_ids(self) -> list[int]:
        return [token for turn in self.turns for token in turn.token_ids]

    @property
    def finish_reason(self) -> str | None:
        return self.turns[-1].finish_reason


@dataclass
class Trajectory:
    """Turns in the order in which they were added; a parent comes before its children."""

    turns: list[Turn] = field(default_factory=list)

    def add(
        self,
        role: str,
        token_ids: Sequence[int],
        *,
        parent: int | None = None,
        log_probs: Sequence[float] = (),
        spans: Sequence[Span] = (),
        policy: str | None = None,
        finish_reason: str | None = None,
    ) -> int:
        """Append a turn below `parent` and return its number. Copies what it gets, so the caller may go on changing its lists."""
        if parent is None and self.turns:
            raise ValueError("a trajectory has one root; name the turn that this one follows")
        if parent is not None and not 0 <= parent < len(self.turns):
            raise ValueError(f"there is no turn {parent} yet; add the parent first")
        if parent is None and (policy is not None or not token_ids):
            raise ValueError(
                "the root is the prompt: at least one token, none of them sampled, because the first token of a row is never predicted"
            )
        self.turns.append(Turn(role, tuple(token_ids), tuple(log_probs), tuple(spans), policy, parent, finish_reason))
        return len(self.turns) - 1

    def leaves(self) -> list[Leaf]:
        """All leaves in tree order: depth first, children in the order in which they were added."""
        children: list[list[int]] = [[] for _ in self.turns]
        for number, turn in enumerate(self.turns):
            if turn.parent is not None:
                children[turn.parent].append(number)
        leaves: list[Leaf] = []
        seen: set[int] = set()
        todo: list[tuple[int, ...]] = [(0,)] if self.turns else []
        while todo:
            path = todo.pop()
            if children[path[-1]]:
                todo.extend((*path, child) for child in reversed(children[path[-1]]))
                continue
            turns = tuple(self.turns[number] for number in path)
            trained = tuple(turn.policy is not None and number not in seen for number, turn in zip(path, turns, strict=True))
            leaves.append(Leaf(len(leaves), turns, trained))
            seen.update(path)
        return leaves


def row_columns(leaf: Leaf, temperature: float) -> dict[str, np.ndarray]:
    """The rollout hop of one row, S tokens and R = S - 1 response positions.

    Position i of `response_mask`, `rollout_log_probs` and `version_spans` speaks of `input_ids[i + 1]`. Spans are given for every
    sampled token of the path, also for those that are trained in another leaf; given tokens have none.
    """
    if not np.isfinite(temperature) or temperature <= 0:
        raise ValueError(f"temperature {temperature} cannot be trained on; sample with one above 0")
    input_ids = np.array(leaf.token_ids, dtype=np.int32)
    response = len(input_ids) - 1
    mask = np.zeros(response, dtype=np.uint8)
    log_probs = np.zeros(response, dtype=np.float32)
    spans: list[tuple[int, int, int, int]] = []
    at = -1  # response position of the turn's first token
    for turn, trained in zip(leaf.turns, leaf.trained, strict=True):
        end = at + len(turn.token_ids)
        if trained:
            mask[at:end] = 1
            log_probs[at:end] = turn.log_probs
        for text, first, last in turn.spans:
            version = parse_version(text)
            spans.append((version.epoch, version.version, at + first, at + last))
        at = end
    return {
        "input_ids": input_ids,
        "response_mask": mask,
        "rollout_log_probs": log_probs,
        "version_spans": np.array(spans, dtype=np.int64).reshape(-1, 4),
        "temperature": np.array(temperature, dtype=np.float32),
    }
