# The discrete-event model that the project's figures come from, as it was given: what driver/whatif.py is compared with. Left as it is.
# ruff: noqa
# fmt: off
import heapq, random, statistics

def run(lens, C=256, P=32, n=8, S=3, K=None, r=1.0, batches=300, seed=0, partial=0):
    K = S if K is None else K
    rng = random.Random(seed); mean = statistics.fmean(lens); B = P * n
    tau = r * B * mean / C; ideal = min(C / mean, B / tau)
    now = 0.0; ev = []; seq = 0; version = 0; busy = False; free = C; pend = []; groups = {}; gid = 0
    stale = []; step = 0; hold = 0.0; hold_since = None; warm = None; short = 0
    def push(t, k, d):
        nonlocal seq; heapq.heappush(ev, (t, seq, k, d)); seq += 1
    def dispatch():
        nonlocal free, gid
        while free > 0:
            if not pend:
                if gid >= (K + version + 1) * P: return
                groups[gid] = [version, n]; pend.extend([gid] * n); gid += 1
            g = pend.pop(0); free -= 1; push(now + rng.choice(lens), 0, g)
    def try_train():
        nonlocal busy, hold_since, hold, short
        if busy: return
        b = version
        ok = lambda g: groups[g][1] <= partial
        ready = [g for g in groups if ok(g)]
        pick = ready[:P]                       # dict order = registration order = oldest first
        left = {}
        if len(ready) >= P:
            taken = set(pick)
            for g in groups:
                if g not in taken: left[groups[g][0]] = left.get(groups[g][0], 0) + 1
        cum, fits = 0, len(ready) >= P         # dry-run: what stays must still fit, tag by tag, into the batches left to it
        for t in sorted(left):
            cum += left[t]
            if cum > (t + S - b) * P: fits = False; break
        if not fits:
            if len(ready) >= P and hold_since is None: hold_since = now
            return
        if hold_since is not None: hold += now - hold_since; hold_since = None
        for g in pick:
            stale.append(b - groups[g][0]); short += groups[g][1] > 0; del groups[g]
        busy = True; push(now + tau, 1, None)
    dispatch()
    while step < batches:
        now, _, k, d = heapq.heappop(ev)
        if k == 0:
            free += 1
            if d in groups: groups[d][1] -= 1
        else:
            busy = False; version += 1; step += 1
            if step == batches // 10: warm = (now, step); stale.clear(); hold = 0.0; short = 0
        try_train(); dispatch()
    t0, s0 = warm
    return (step - s0) * B / (now - t0) / ideal, statistics.fmean(stale), max(stale), hold / (now - t0), short / max(1, (step - s0) * P)
