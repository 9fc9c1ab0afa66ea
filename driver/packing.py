"""Numbers into bins: dealt out evenly, or packed under a limit. Nothing here knows what a row is.

    split    as even as can be: the longest first onto the lightest bin, then `level`
    pack     as few bins as can be, none above the limit: best fit, longest first (as good a guarantee as first fit, and found by
             bisection); spread over as many bins again when that fits too, then `level`
    level    a local search: the heaviest bin and a light one are dealt out anew, by differencing (Karmarkar and Karp, "The differencing
             method of set partitioning", 1982) or by one exchange, whatever leaves the heavier of the two lightest

Ties go by index, so the same numbers give the same bins.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PARTNERS = 6  # so many light bins are tried before the search gives up

Bins = list[list[int]]


@dataclass(frozen=True)
class Effort:
    """What ends the search: the heaviest is within `even` of the mean, or each number was looked at `looks` times, on average."""

    even: float
    looks: int


FINE = Effort(1e-6, 4)  # between ranks, which wait for each other
COARSE = Effort(1e-3, 1)  # between micro-batches, which follow each other
Pair = tuple[list[int], list[int]]


def split(work: Sequence[float], parts: int) -> Bins:
    """Indices in `parts` bins, the heaviest of them as light as can be; some may be empty."""
    bins: Bins = [[] for _ in range(parts)]
    heap = [(0.0, part) for part in range(parts)]
    for index in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        load, part = heap[0]
        bins[part].append(index)
        heapq.heapreplace(heap, (load + work[index], part))
    level(bins, work, FINE)
    return bins


def pack(sizes: Sequence[int], limit: int, work: Sequence[float], besides: int = 0, multiple_of: int = 1) -> Bins:
    """Indices in few bins, none with sizes above `limit` together, and of about equal work. No size may be above the limit.

    Their number, and `besides`, make a multiple of `multiple_of`; some may be empty for that.
    """
    packed = _best_fit(sizes, limit)
    packed += [[] for _ in range(-(len(packed) + besides) % multiple_of)]
    bins = _spread(sizes, limit, work, len(packed)) or packed
    level(bins, work, COARSE, sizes, limit)
    return bins


def fewest(sizes: Sequence[int], limit: int) -> int:
    """A number of bins that no packing stays below (Martello and Toth, "Knapsack Problems", 1990, section 8.3, L2)."""
    ordered = np.sort(np.asarray(sizes, dtype=np.int64))
    ends = np.concatenate([[0], np.cumsum(ordered)])
    half = int(np.searchsorted(ordered, limit // 2, side="right"))
    bound = max(-(-int(ends[-1]) // limit), len(ordered) - half)
    for small in dict.fromkeys(ordered[:half].tolist()):
        # Those above limit - small share a bin with none of at least `small`; what the other large ones leave takes these.
        first = int(np.searchsorted(ordered, small, side="left"))
        large = int(np.searchsorted(ordered, limit - small, side="right"))
        room = (large - half) * limit - int(ends[large] - ends[half])
        bound = max(bound, len(ordered) - half + max(0, -(-(int(ends[half] - ends[first]) - room) // limit)))
    return bound


def level(bins: Bins, work: Sequence[float], effort: Effort, sizes: Sequence[int] = (), limit: int | None = None) -> None:
    """Make the heaviest bin lighter, in place, as long as a light one can take something of it and the effort lasts."""
    looks = effort.looks * sum(map(len, bins))
    order = sorted((sum(work[index] for index in members), number) for number, members in enumerate(bins))
    total = sum(load for load, _ in order)
    while looks > 0 and len(order) > 1:
        load, heavy = order[-1]
        if len(bins[heavy]) < 2:  # nothing to give away: the others may still wait for each other less
            order.pop()
            total -= load
            continue
        if load <= total / len(order) * (1.0 + effort.even):
            return
        for place, (other, light) in enumerate(order[: min(PARTNERS, len(order) - 1)]):
            looks -= len(bins[heavy]) + len(bins[light])
            better = _dealt_anew(bins[heavy], bins[light], load, other, work, effort.even, sizes, limit)
            if better is not None:
                bins[heavy], bins[light] = better
                del order[-1], order[place]
                for number in (heavy, light):
                    bisect.insort(order, (sum(work[index] for index in bins[number]), number))
                break
        else:
            return


def _dealt_anew(
    heavy: list[int],
    light: list[int],
    more: float,
    less: float,
    work: Sequence[float],
    even: float,
    sizes: Sequence[int],
    limit: int | None,
) -> Pair | None:
    """The two bins, of `more` and `less` work, with a lighter heaviest, within the limit; None when neither way finds it."""
    best, found = more, None
    good = (more + less) / 2 * (1.0 + even)
    for way in (_differenced, _exchanged):
        made = way(heavy, light, more - less, work)
        if made is None or (limit is not None and any(sum(sizes[i] for i in side) > limit for side in made)):
            continue
        heaviest = max(sum(work[i] for i in side) for side in made)
        if heaviest < best * (1.0 - 1e-12):
            best, found = heaviest, made
        if best <= good:
            break
    return found


def _differenced(heavy: list[int], light: list[int], difference: float, work: Sequence[float]) -> Pair:
    """Both bins' numbers in two: the two largest go to different sides, and their difference stands for them, until one is left."""
    members = [*heavy, *light]
    heap = [(-work[index], place) for place, index in enumerate(members)]
    heapq.heapify(heap)
    against: list[tuple[int, int]] = []  # of each difference: what it stands for
    while len(heap) > 1:
        larger, one = heapq.heappop(heap)
        smaller, other = heap[0]
        heapq.heapreplace(heap, (larger - smaller, len(members) + len(against)))
        against.append((one, other))
    sides: Pair = ([], [])
    stack = [(heap[0][1], 0)]
    while stack:
        place, side = stack.pop()
        if place < len(members):
            sides[side].append(members[place])
        else:
            one, other = against[place - len(members)]
            stack += [(one, side), (other, 1 - side)]
    return sides


def _exchanged(heavy: list[int], light: list[int], difference: float, work: Sequence[float]) -> Pair | None:
    """One number of the heavy bin goes to the light one, for one of these or for none: as near to half their difference as can be."""
    half = difference / 2
    order = sorted(light, key=lambda i: (work[i], i))
    given_back = [0.0, *(work[i] for i in order)]
    best: tuple[float, int, int] | None = None
    for index in heavy:
        place = bisect.bisect_left(given_back, work[index] - half)
        for other in (place - 1, place):
            if 0 <= other < len(given_back):
                miss = abs(work[index] - given_back[other] - half)
                if miss < half * (1.0 - 1e-12) and (best is None or miss < best[0]):
                    best = miss, index, other
    if best is None:
        return None
    _, index, other = best
    back = order[other - 1 : other] if other else []
    return [i for i in heavy if i != index] + back, [i for i in light if i not in back] + [index]


def _best_fit(sizes: Sequence[int], limit: int) -> Bins:
    """Longest first, each into the bin that it fills best."""
    bins: Bins = []
    rooms: list[tuple[int, int]] = []  # (room, bin), ascending
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        place = bisect.bisect_left(rooms, (sizes[index], -1))
        if place == len(rooms):
            rooms.append((limit, len(bins)))
            bins.append([])
        room, chosen = rooms.pop(place)
        bins[chosen].append(index)
        bisect.insort(rooms, (room - sizes[index], chosen))
    return bins


def _spread(sizes: Sequence[int], limit: int, work: Sequence[float], parts: int) -> Bins | None:
    """Over so many bins, the most work first onto the lightest that has room; None when one finds no room among the lightest."""
    bins: Bins = [[] for _ in range(parts)]
    used = [0] * parts
    heap = [(0.0, part) for part in range(parts)]
    for index in sorted(range(len(sizes)), key=lambda i: (-work[i], i)):
        full = []
        while heap and used[heap[0][1]] + sizes[index] > limit:
            full.append(heapq.heappop(heap))
        if not heap or len(full) > PARTNERS:
            return None
        load, part = heap[0]
        bins[part].append(index)
        used[part] += sizes[index]
        heapq.heapreplace(heap, (load + work[index], part))
        for back in full:
            heapq.heappush(heap, back)
    return bins
