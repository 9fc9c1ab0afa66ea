"""Text in and out, for requests that want it: the checkpoint's tokenizer.json, and the search for stop strings."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

# A token is at least one byte and a character at most four, so the last four tokens a character of the stop string must hold it.
TOKENS_PER_CHARACTER = 4
HALF_A_CHARACTER = "\ufffd"


class Text:
    """Tokenizer of one checkpoint. `eos_id` is the id of its end-of-text token, or None."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.eos_id = self._eos_id(directory)

    def _eos_id(self, directory: Path) -> int | None:
        path = directory / "tokenizer_config.json"
        token = json.loads(path.read_text()).get("eos_token") if path.is_file() else None
        if isinstance(token, dict):
            token = token.get("content")
        return self._tokenizer.token_to_id(token) if token else None

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def find_stop(self, ids: list[int], stops: tuple[str, ...]) -> str | None:
        """The first of `stops` that the end of the output contains."""
        tail = self._tail(ids, stops)
        return next((stop for stop in stops if stop in tail), None)

    def may_start_stop(self, ids: list[int], stops: tuple[str, ...]) -> bool:
        """True when the output ends with the beginning of a stop string."""
        tail = self._tail(ids, stops)
        return any(tail.endswith(stop[:size]) for stop in stops for size in range(1, len(stop)))

    def _tail(self, ids: list[int], stops: tuple[str, ...]) -> str:
        return self.decode(ids[-TOKENS_PER_CHARACTER * (max(map(len, stops)) + 1) :])


def open_text(directory: Path) -> Text | None:
    """None when the checkpoint has no tokenizer.json: the engine then speaks token ids only."""
    return Text(directory) if (directory / "tokenizer.json").is_file() else None
