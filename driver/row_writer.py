"""What the driver puts of a trajectory: its rows' objects, one a hop, in the form that the schema says or not at all.

columns ──check_form──▶ small: into the reference itself    others: into the store, which is waited for when it is full
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from driver.core import Core
from driver.turns import GivenUp
from store import Full, Ref, Value, riding
from store.schema import check_form

FULL_AGAIN_S = 0.2
FULL_ALARM = "rows wait for room in the store, though it was kept for them: something else fills its memory, free it or enlarge it"


class RowWriter:
    def __init__(self, core: Core) -> None:
        self._core = core
        self.full: dict[str, str] = {}
        """key -> what the store said: objects that wait for room"""

    async def put(self, name: str, hop: str, columns: Mapping[str, Value], rows: int = 1) -> Ref:
        """Small ones into the reference, which each of the rows has, others into the store. One that is full is waited for: a row is never
        lost for it (B2). No sample is registered meanwhile; since registration reserves, only others who fill the same memory can bring it
        about. Raises GivenUp, with the column's name, for what is not of the hop's form: no reader would take it."""
        core, key = self._core, f"{self._core.run_id}/{name}/{hop}"
        try:
            check_form(hop, columns)
        except ValueError as error:
            raise GivenUp(f"data: the row cannot be stored: {error}") from error
        if (small := riding(key, columns, core.config.store.inline_bytes // rows)) is not None:
            return small
        try:
            while True:
                try:
                    return await core.gate.put(key, columns)
                except Full as error:
                    self.full[key] = str(error)
                core.alarm("store", FULL_ALARM)
                core.ring()
                await asyncio.sleep(FULL_AGAIN_S)  # readers in other processes let go without a word to us
        finally:
            if self.full.pop(key, None) is not None and not self.full:
                core.alarm("store", None)
