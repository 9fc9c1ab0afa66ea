"""What a run has measured of itself: how long its parts take when they work, and how long its answers are.

Two readers: the watermark (Little's law) and the what-if model. So only what stays true in a storm is taken: a stage's time while it
works, never the time in which others failed it. A trajectory that lost a request, a push that had to be tried again, a batch whose trainer
died say nothing here. No clock, no loop: the shells time things and push the seconds in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, ClassVar

LENGTHS = 4096  # the newest are kept: what a policy writes grows and shrinks as it learns
BY_TRAJECTORY = 1 / 512  # weight of one more trajectory: lengths scatter, and their mean should not
BY_SAMPLE = 1 / 100
BY_BATCH = 0.2
PROBE = 1.1  # a stage without a backlog may be faster than it was seen to be: its rate is let go of by a tenth a second


@dataclass
class Rate:
    """Mean of a duration or a size: of all while there are few, then with exponentially falling weights. None until the first."""

    weight: float = BY_BATCH
    value: float | None = None
    count: int = 0

    def observe(self, value: float) -> None:
        self.count += 1
        weight = max(self.weight, 1.0 / self.count)
        self.value = value if self.value is None else self.value + weight * (value - self.value)

    def or_else(self, value: float) -> float:
        return value if self.value is None else self.value


@dataclass
class Backlog:
    """How many a second a stage ends when it is the slow one: learned only from times in which it never ran short of work.

    A stage that is given little ends little, and that is no measure of it. So a look counts only when all through it at least twice as
    many were there as its own working time explains; else what was learned before is raised a little, until it does not bind any more.
    """

    per_s: float | None = None
    rate: Rate = field(default_factory=Rate)

    def look(self, span_s: float, ended: int, fewest: int, work_s: float) -> None:
        """Since the last look: its length, how many ended, the fewest that were there at any time; and what one takes in its turn."""
        if not ended or span_s <= 0:
            return  # nothing came, or it stands: neither says how fast it works
        rate = ended / span_s
        if fewest >= 2.0 * rate * work_s + 1.0:
            if self.per_s is not None and self.rate.value is not None:
                self.rate.value = self.per_s  # goes on from where it was let go to
            self.rate.observe(rate)
            self.per_s = self.rate.value
        elif self.per_s is not None:
            self.per_s *= PROBE


@dataclass
class Measured:
    """Of one run, since its process started."""

    training_s: Rate = field(
        default_factory=Rate
    )  # of a batch, from its choice to where the next may be chosen: plan, step, snapshot, save
    engine_s: Rate = field(default_factory=lambda: Rate(BY_TRAJECTORY))  # a trajectory's requests on their engines, gates open
    sample_s: Rate = field(default_factory=lambda: Rate(BY_SAMPLE))  # the slowest trajectory of a sample: both of the above
    aside_s: Rate = field(default_factory=lambda: Rate(BY_TRAJECTORY))  # a trajectory's time between its requests: tools
    scorer_s: Rate = field(default_factory=lambda: Rate(BY_TRAJECTORY))  # what the scorer itself takes for a leaf
    score_s: Rate = field(default_factory=lambda: Rate(BY_TRAJECTORY))  # from asked to scored, with the wait for others
    publish_s: Rate = field(default_factory=Rate)  # of a push, before the gates are shut
    pause_s: Rate = field(default_factory=Rate)  # gates shut
    token_s: Rate = field(default_factory=lambda: Rate(BY_TRAJECTORY))  # between two tokens of one request
    leaves: Rate = field(default_factory=lambda: Rate(BY_TRAJECTORY))  # of a trajectory
    reward: Backlog = field(default_factory=Backlog)  # in leaves
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=LENGTHS))  # tokens that a trajectory sampled

    def trajectory(self, *, engine_s: float, aside_s: float, tokens: int) -> None:
        """One that was generated without losing a request."""
        self.engine_s.observe(engine_s)
        self.aside_s.observe(aside_s)
        self.lengths.append(tokens)

    def decoded(self, tokens: int, seconds: float) -> None:
        """One request's tokens after its first chunk, and the seconds between that chunk and its last."""
        if tokens > 0 and seconds > 0:
            self.token_s.observe(seconds / tokens)

    def scored(self, waited_s: float, worked_s: float) -> None:
        self.score_s.observe(waited_s)
        self.scorer_s.observe(worked_s)

    def pushed(self, before_s: float, pause_s: float) -> None:
        """A push that every engine passed at the first attempt."""
        self.publish_s.observe(max(0.0, before_s))
        self.pause_s.observe(pause_s)

    _KEPT: ClassVar = ("training_s", "engine_s", "aside_s", "scorer_s", "score_s", "publish_s", "pause_s", "token_s")

    def kept(self) -> dict[str, Any]:
        """What the next start may begin from, as JSON."""
        rates = {name: rate.value for name in self._KEPT if (rate := getattr(self, name)).value is not None}
        return {"lengths": list(self.lengths), "seconds": rates}

    @classmethod
    def of_kept(cls, kept: dict[str, Any]) -> Measured:
        """What an earlier process knew, for the model to be asked with. Caps are never made of it: a restart may have changed anything."""
        made = cls()
        made.lengths.extend(int(count) for count in kept.get("lengths", ()))
        for name, value in kept.get("seconds", {}).items():
            if name in cls._KEPT:
                getattr(made, name).observe(float(value))
        return made
