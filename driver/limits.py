"""S and P as they are now: as the configuration says, or as they were changed over REST while the run goes on.

    another S     is that of samples registered from now on; deadlines are stored, so nothing that lives is judged anew.
    a larger P    from the next batch on.
    a smaller P   is what admission counts with from now on. Batches shrink to it as soon as what lives fits: until then each is as small as
                  A4 lets it be, which is at most what P was.

A change is kept in the ledger's database and holds over restarts, until the configuration says something else than it said then.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from driver.batcher import smallest_batch
from driver.ledger_db import LedgerDB
from driver.ledger_rows import Upsert


class Limits(msgspec.Struct, frozen=True):
    """`bound` is S, `samples` the P that is wanted."""

    bound: int
    samples: int

    def samples_now(self, live_by_deadline: Mapping[int, int], next_batch: int) -> int:
        """P of the next batch: what is wanted, or the least with which all that lives is trained in time (A4)."""
        return max(self.samples, smallest_batch(live_by_deadline, next_batch))


class _Changed(msgspec.Struct, frozen=True):
    """What was set, and what the configuration said then."""

    limits: Limits
    configured: Limits


def load_limits(db: LedgerDB, configured: Limits) -> Limits:
    found = db.query("SELECT value FROM meta WHERE name = 'limits'")
    if not found:
        return configured
    changed = msgspec.json.decode(found[0][0], type=_Changed)
    return changed.limits if changed.configured == configured else configured


def save_limits(db: LedgerDB, limits: Limits, configured: Limits) -> None:
    db.write([Upsert("meta", {"name": "limits", "value": msgspec.json.encode(_Changed(limits, configured))})])
