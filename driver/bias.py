"""Is what is trained what was sampled? Shares and rewards by length, task type and dataset, over windows of versions.

Every trajectory is counted when the last of its sample has ended, in the window of its version_tag: as *sampled*, and as *trained* if it
was. What the filter took out (it is meant to shift the shares) and what the end of the run cut off are counted apart. A window is judged
once it is closed, that is when none of its samples lives any more: before, long answers are only late.

A length is the tokens sampled; of a trajectory that was cut off, those it had by then (it would have had more). Lengths are kept in bins
of a sixteenth of an octave, and a decile is a tenth of what was sampled, along those bins.

Two alarms, `judge` and `length_alone`, each only where chance does not explain what is seen. No clock, no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from driver.alarms import Alarm

DIMENSIONS = ("length", "task_type", "dataset")
KEPT_WINDOWS = 32
KEYS_KEPT = 100  # task types or datasets told apart in a window; the rest are OTHERS
OTHERS = "(others)"
UNKNOWN = "unknown"  # the length of what was cut off before a restart
CERTAIN = 4.0  # standard deviations. By chance 1 comparison in 16,000 is further off; a window has some ten to twenty
EXPLAINED = 0.8  # of a rise in reward, by the lengths alone


class Cell(msgspec.Struct):
    """Trajectories of one length, task type or dataset."""

    sampled: int = 0
    trained: int = 0
    filtered: int = 0
    reward_sum: float = 0.0  # of those trained

    def add(self, other: Cell) -> None:
        self.sampled += other.sampled
        self.trained += other.trained
        self.filtered += other.filtered
        self.reward_sum += other.reward_sum

    @property
    def reward(self) -> float | None:
        return self.reward_sum / self.trained if self.trained else None


class Window(msgspec.Struct):
    """All that ended of the samples registered under versions `first` to `last`."""

    first: int
    last: int
    samples: int = 0
    whole: Cell = msgspec.field(default_factory=Cell)
    ended: int = 0  # cut off by the end of the run
    lost_squares: int = 0  # over samples: the square of how many of its trajectories were sampled and not trained
    trained_samples: int = 0
    mean_sum: float = 0.0  # over samples of which some was trained: their mean reward, and its square
    mean_squares: float = 0.0
    cells: dict[str, dict[str, Cell]] = msgspec.field(default_factory=lambda: {name: {} for name in DIMENSIONS})
    reasons: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def lost(self) -> int:
        return self.whole.sampled - self.whole.trained

    @property
    def cluster(self) -> float:
        """How much wider chance spreads a count of what was lost, as siblings are lost together: 1 alone, n in whole samples (Kish)."""
        return max(1.0, self.lost_squares / self.lost) if self.lost else 1.0

    @property
    def reward_error(self) -> float:
        """The standard error of the mean reward, from the spread of the samples' own means: siblings are no independent draws."""
        if self.trained_samples < 2:
            return math.inf
        mean = self.mean_sum / self.trained_samples
        spread = max(0.0, self.mean_squares / self.trained_samples - mean * mean)
        return math.sqrt(spread / (self.trained_samples - 1))

    def cell(self, dimension: str, key: str) -> Cell:
        cells = self.cells[dimension]
        if key not in cells:
            if dimension != "length" and len(cells) >= KEYS_KEPT:
                key = OTHERS
            cells.setdefault(key, Cell())
        return cells[key]

    def add(self, other: Window) -> None:
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        self.samples += other.samples
        self.whole.add(other.whole)
        self.ended += other.ended
        self.lost_squares += other.lost_squares
        self.trained_samples += other.trained_samples
        self.mean_sum += other.mean_sum
        self.mean_squares += other.mean_squares
        for dimension, cells in other.cells.items():
            for key, cell in cells.items():
                self.cell(dimension, key).add(cell)
        for reason, count in other.reasons.items():
            self.reasons[reason] = self.reasons.get(reason, 0) + count


@dataclass(frozen=True)
class End:
    """How one trajectory ended. `tokens` None: it was cut off and nobody knows how long it was by then."""

    outcome: str  # trained | discarded | evaluated
    tokens: int | None
    reward: float | None = None
    reason: str | None = None  # its kind


@dataclass(frozen=True)
class Row:
    """One length range, task type or dataset of a window; `z` is the gap of the shares in standard deviations of chance."""

    name: str
    sampled: int
    trained: int
    filtered: int
    share_sampled: float
    share_trained: float
    z: float
    reward: float | None

    @property
    def gap(self) -> float:
        return self.share_trained - self.share_sampled


def bin_of(tokens: int) -> int:
    """Exact below 16, then sixteen bins an octave."""
    if tokens < 16:
        return tokens
    octave = tokens.bit_length() - 1
    return 16 * (octave - 3) + ((tokens >> (octave - 4)) & 15)


def least_of(number: int) -> int:
    """The fewest tokens of a bin."""
    return number if number < 16 else (16 + number % 16) << (number // 16 - 1)


def deciles(windows: Iterable[Window]) -> dict[str, int]:
    """Bin to decile 0 to 9 of what these windows sampled: a bin is where its middle lies. One length may fill several."""
    counts: dict[int, int] = {}
    for window in windows:
        for key, cell in window.cells["length"].items():
            if key != UNKNOWN:
                counts[int(key)] = counts.get(int(key), 0) + cell.sampled
    total, before, found = sum(counts.values()), 0, {}
    for number in sorted(counts):
        found[str(number)] = min(9, 10 * (2 * before + counts[number]) // max(1, 2 * total))
        before += counts[number]
    return found


def by_decile(window: Window, edges: Mapping[str, int]) -> dict[int, Cell]:
    """Decile to cell; 10 is the unknown length."""
    out: dict[int, Cell] = {}
    for key, cell in window.cells["length"].items():
        out.setdefault(edges.get(key, 10), Cell()).add(cell)
    return dict(sorted(out.items()))


def rows(window: Window, dimension: str) -> list[Row]:
    """The table of one dimension: lengths in deciles, the rest by name."""
    if dimension != "length":
        return [_row(window, key, cell) for key, cell in sorted(window.cells[dimension].items())]
    edges = deciles([window])
    ranges: dict[int, list[int]] = {}
    for key, decile in edges.items():
        ranges.setdefault(decile, []).append(int(key))
    names = {d: f"{least_of(min(bins))} to {least_of(max(bins) + 1) - 1} tokens" for d, bins in ranges.items()} | {10: UNKNOWN}
    return [_row(window, names[decile], cell) for decile, cell in by_decile(window, edges).items()]


def _row(window: Window, name: str, cell: Cell) -> Row:
    sampled, trained = window.whole.sampled, window.whole.trained
    share_sampled, share_trained = cell.sampled / max(1, sampled), cell.trained / max(1, trained)
    # If chance chose what was lost, the trained of this cell are drawn without putting back: a hypergeometric count.
    expected = trained * share_sampled
    variance = expected * (1 - share_sampled) * (sampled - trained) / max(1, sampled - 1) * window.cluster
    z = (cell.trained - expected) / math.sqrt(variance) if variance > 0 else 0.0
    return Row(name, cell.sampled, cell.trained, cell.filtered, share_sampled, share_trained, z, cell.reward)


def judge(window: Window, tolerance: float) -> list[Alarm]:
    """Where the shares part: by more than `tolerance`, and by more than chance would (CERTAIN, with siblings lost together)."""
    if not window.whole.trained:
        return []
    found = []
    for dimension in DIMENSIONS:
        parted = [row for row in rows(window, dimension) if abs(row.gap) > tolerance and abs(row.z) > CERTAIN]
        if parted:
            row = max(parted, key=lambda r: abs(r.gap))
            reason = max(window.reasons, key=lambda r: window.reasons[r]) if window.reasons else "no reason"
            what = {"length": "answers of", "task_type": "task type", "dataset": "dataset"}[dimension]
            name = f"bias by {dimension.replace('_', ' ')}"
            words = (
                f"{name}: {what} {row.name} are {row.share_sampled:.1%} of what was sampled and "
                f"{row.share_trained:.1%} of what was trained in versions {window.first} to {window.last} ({row.z:+.1f} standard "
                f"deviations); most were lost to: {reason}"
            )
            found.append(Alarm(name, words, abs(row.gap)))
    return found


@dataclass(frozen=True)
class Rise:
    """A change of the mean reward between two windows, and the part that the mix of lengths makes of it (Kitagawa's decomposition)."""

    rise: float
    by_length: float
    z: float


def rise(before: Window, after: Window) -> Rise | None:
    """mean after - mean before = sum of (share change x mean reward) + sum of (mean share x reward change), over common deciles."""
    means = before.whole.reward, after.whole.reward
    if means[0] is None or means[1] is None:
        return None
    edges = deciles([before, after])
    old, new = by_decile(before, edges), by_decile(after, edges)
    by_length = 0.0
    for decile in {*old, *new}:
        a, b = old.get(decile, Cell()), new.get(decile, Cell())
        known = [r for r in (a.reward, b.reward) if r is not None]  # a length seen on one side only has the reward it has there
        if known:
            by_length += (b.trained / after.whole.trained - a.trained / before.whole.trained) * sum(known) / len(known)
    error = math.hypot(before.reward_error, after.reward_error)
    change = means[1] - means[0]
    return Rise(change, by_length, change / error if error > 0 else math.copysign(math.inf, change))


def length_alone(before: Window, after: Window) -> Alarm | None:
    """The reward rose, by more than chance, and the lengths' mix explains it: within a length answers are hardly better."""
    found = rise(before, after)
    if found is None or found.rise <= 0 or found.z < CERTAIN or found.by_length < EXPLAINED * found.rise:
        return None
    words = (
        f"reward rose by {found.rise:.3g} from versions {before.first} to {before.last} to {after.first} to {after.last}, and "
        f"{min(1.0, found.by_length / found.rise):.0%} of it is a change of lengths: answers of one length are hardly better than before"
    )
    return Alarm("a rise of reward by lengths alone", words, found.rise)


class Meter:
    """The windows of a run. `changed` names those to be saved."""

    def __init__(self, window_versions: int, saved: Sequence[Window] = ()) -> None:
        self.window_versions = window_versions
        self.windows = {w.first: w for w in saved if w.first % window_versions == 0 and w.last == w.first + window_versions - 1}
        self.changed: set[int] = set()

    def add(self, version_tag: int, task_type: str, dataset: str, ends: Sequence[End]) -> None:
        """A sample is over."""
        first = version_tag - version_tag % self.window_versions
        window = self.windows.setdefault(first, Window(first, first + self.window_versions - 1))
        self.changed.add(first)
        for old in sorted(self.windows)[:-KEPT_WINDOWS]:
            del self.windows[old]
            self.changed.discard(old)
        if first not in self.windows:
            return  # older than all that is kept
        window.samples += 1
        lost, rewards = 0, []
        for end in ends:
            if end.outcome == "evaluated":
                continue
            if end.outcome == "discarded" and end.reason is not None and end.reason.startswith("run ended"):
                window.ended += 1
                continue
            filtered, trained = (end.reason or "").partition(":")[0] == "filtered", end.outcome == "trained"
            if trained and end.reward is not None:
                rewards.append(end.reward)
            one = Cell(int(not filtered), int(trained), int(filtered), (end.reward or 0.0) if trained else 0.0)
            length = UNKNOWN if end.tokens is None else str(bin_of(end.tokens))
            for cell in (window.whole, window.cell("length", length), window.cell("task_type", task_type), window.cell("dataset", dataset)):
                cell.add(one)
            if not filtered and not trained:
                lost += 1
                reason = end.reason or "no reason"
                window.reasons[reason] = window.reasons.get(reason, 0) + 1
        window.lost_squares += lost * lost
        if rewards:
            mean = sum(rewards) / len(rewards)
            window.trained_samples += 1
            window.mean_sum += mean
            window.mean_squares += mean * mean

    def closed(self, oldest_version: int) -> list[Window]:
        """Those to which nothing comes any more, as no sample of a version below `oldest_version` lives or will be registered."""
        return [self.windows[first] for first in sorted(self.windows) if self.windows[first].last < oldest_version]

    def total(self, windows: Iterable[Window]) -> Window:
        """Of all these."""
        kept = list(windows)
        whole = Window(min((w.first for w in kept), default=0), max((w.last for w in kept), default=0))
        for window in kept:
            whole.add(window)
        return whole

    def alarms(self, oldest_version: int, tolerance: float) -> list[Alarm]:
        """Of the newest closed window, of all that are kept together (a small lasting gap needs many), and of the reward's rise."""
        closed = self.closed(oldest_version)
        if not closed:
            return []
        found = judge(closed[-1], tolerance)
        if len(closed) > 1:
            found = found or judge(self.total(closed), tolerance)
            told = length_alone(closed[0], closed[-1])
            found += [told] if told is not None else []
        return found
