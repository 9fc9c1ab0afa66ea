"""Which row is registered next: one that was solved is passed by, and one that can never be sampled is left out for good.

Promise: a row whose prompt can not be tokenized, or has no place under `rollout.context_length` (no micro-batch is smaller), is never
registered. It is left out once, for the life of the run: a line in the ledger's file and in the log, a count in the status; no pass comes
to it again, so a run of which no row fits ends, or waits for others, and does not spin.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from driver.core import Core
from driver.datasets import DataRow
from driver.events import RowSkipped
from driver.feed import Place
from driver.settings import RunConfig
from rollout.tokens import TokenizerView

log = logging.getLogger("headrace.next_row")
AT_ONCE, AT_ONCE_S = 100, 0.02  # so many rows are passed by, or for so long, before the other loops have their turn


class Unfit(ValueError):
    """Why a prompt can never be sampled; up to the colon it is what is counted."""


def prompt_ids(row: DataRow, tokenizer: TokenizerView, config: RunConfig) -> list[int]:
    """A row's prompt in tokens. Unfit when no engine of the run can take it and make one token of an answer."""
    asked = row.messages if row.prompt is None else row.prompt
    assert asked is not None
    try:
        ids = tokenizer.prompt_ids(asked, apply_chat_template=config.rollout.apply_chat_template)
    except ValueError as error:
        raise Unfit(f"the prompt can not be tokenized: {error}") from error
    if not ids:
        raise Unfit("the prompt is empty: it has no tokens")
    length = config.rollout.context_length
    if len(ids) > length - 2:  # one token of the answer, and one that engines keep back
        raise Unfit(
            f"the prompt is too long: it has {len(ids):,} tokens, and rollout.context_length ({length:,}) leaves room for {length - 2:,}"
        )
    return ids


@dataclass(frozen=True)
class Head:
    """The next row, read and in tokens."""

    segment: int
    row_index: int
    row: DataRow
    prompt: Sequence[int]


class NextRow:
    def __init__(self, core: Core, tokenizer: TokenizerView) -> None:
        self._core = core
        self._tokenizer = tokenizer
        self.head: Head | None = None

    def look(self) -> bool:
        """Pass by what need not or can not be registered, up to `head`. False: there may be more of them, and the bell that each rings
        brings us back."""
        core = self._core
        if core.draining is not None:
            return True
        until = time.monotonic() + AT_ONCE_S
        for _ in range(AT_ONCE):
            place = core.feed.next_place(core.ledger.cursor)
            if place is None:
                return True
            if core.config.filter.skip_solved and core.ledger.solved.get((place.segment, place.row_index), -2) == place.pass_index - 1:
                self._pass_by(place)
            elif self._fits(place):
                return True
            if time.monotonic() > until:
                break
        return False

    def _pass_by(self, place: Place) -> None:
        self._core.apply(
            RowSkipped(
                dataset_id=place.dataset_id,
                segment=place.segment,
                row_index=place.row_index,
                pass_index=place.pass_index,
                position=place.position,
                time=time.time(),
            )
        )

    def _fits(self, place: Place) -> bool:
        """Whether it can be sampled: then it is the head. If not it is left out."""
        head = self.head
        if head is not None and (head.segment, head.row_index) == (place.segment, place.row_index):
            return True
        feed = self._core.feed
        row = feed.row(place.segment, place.row_index)
        try:
            prompt = array("I", prompt_ids(row, self._tokenizer, self._core.config))
        except Unfit as unfit:
            feed.leave_out(place.segment, place.row_index, str(unfit), time.time())
            name = f"row {place.row_index + 1} of dataset {place.dataset_id} (segment {place.segment})"
            log.warning("%s is left out of every pass: %s; change it, or the setting, and submit it again", name, unfit)
            self._core.ring()
            return False
        self.head = Head(place.segment, place.row_index, row, prompt)
        return True
