"""How much of a search is still to do: steps, time and device-hours, from what its trials have cost so far."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dgsearch.report.snapshot import Course, Seen
from dgsearch.search.budget import Spent
from dgsearch.search.engine import REDUCTION, floors_turn


@dataclass(frozen=True)
class Foresight:
    """What is expected of the rest of a search; None where nothing is known yet that would say.

    ``trials`` still to end, their optimizer ``steps``, ``seconds`` until the last ends, and the ``device_seconds``.
    """

    trials: float | None
    steps: float | None
    seconds: float | None
    device_seconds: float | None


def expected_steps(steps: int, rungs: Sequence[int], shares: Sequence[float], *, after: int = 0) -> float:
    """Return how many steps a trial is expected to do from step ``after`` on.

    ``shares`` is the chance that it goes on at each of ``rungs``.
    """
    expected, chance, at = 0.0, 1.0, after
    for rung, share in zip(rungs, shares, strict=True):
        if rung > after:
            expected, at = expected + chance * (rung - at), rung
            chance *= share
    return expected + chance * (steps - at)


def shares_past(rungs: Sequence[int], trials: Sequence[Seen]) -> list[float]:
    """Return the share of trials that goes on at each rung, by those that were not spared.

    As if three trials, of which one went on, had been there before: the rule's own share counts at first.
    """
    found = []
    for rung in rungs:
        judged = [t for t in trials if not t.default and t.step >= rung]
        past = sum(t.step > rung or t.state == "complete" for t in judged)
        stopped = sum(t.step == rung and t.state == "pruned" for t in judged)
        found.append((past + 1) / (past + stopped + REDUCTION))
    return found


def step_seconds(trials: Sequence[Seen], measured: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a step by family: from its trials, else as ``measured`` before them."""
    steps: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    for t in trials:
        steps[t.family] += t.step
        seconds[t.family] = seconds.get(t.family, 0.0) + t.seconds
    return dict(measured) | {name: seconds[name] / count for name, count in steps.items() if count}


def _to_begin(course: Course, begun: Sequence[Seen], queue: Sequence[str]) -> tuple[list[tuple[str, bool]], int]:
    """Return the trials of a fold whose family is known before they begin (and if default), and how many others."""
    room = (course.asked(begun) or 0) - len(begun)
    ran = {t.family for t in begun if t.default}
    remaining = course.remaining(begun)
    known = [(name, True) for name in course.defaults if name not in ran]
    used = max((t.queued + 1 for t in begun if t.queued is not None), default=0)
    known += [(name, False) for name in queue[used:] if name in remaining]
    had = Counter(t.family for t in begun) + Counter(name for name, _ in known)
    owed = [(name, False) for n in range(course.floor) for name in remaining if had[name] <= n]
    known = known[:room]
    turns = sum(map(floors_turn, range(len(begun) + len(known), len(begun) + room)))
    known += owed[:turns]
    return known, room - len(known)


def foresee(
    course: Course,
    trials: Sequence[Seen],
    *,
    spent: Spent,
    concurrent: int,
    devices: float = 1.0,
    measured: Mapping[str, float] | None = None,
) -> Foresight:
    """Return what is left of a search.

    A family's step costs what it has cost so far, evaluations included, or what was ``measured`` (seconds, by
    family); a family not yet seen costs the mean of those that were. Trials to begin are the defaults, of which
    the first is spared, then queues, then floors' and free ones in turn: of the families as often as drawn so far.
    ``concurrent`` trials run at once, each on ``devices``. Hours and device-hours bound it: trials that run when they
    are used up go on to their end.
    """
    rungs, steps = course.rungs, course.steps
    shares = shares_past(rungs, trials)
    costs = step_seconds(trials, measured or {})
    usual = sum(costs.values()) / len(costs) if costs else 0.0
    drawn = Counter(t.family for t in trials if not t.default)
    weights = {name: drawn[name] + 1 for name in course.floored or costs}
    usual_free = sum(w * costs.get(n, usual) for n, w in weights.items()) / max(1, sum(weights.values()))

    def steps_of(family: str, default: bool, after: int = 0) -> float:
        spared = default and family in course.defaults[:1]
        return expected_steps(steps, rungs, [1.0] * len(rungs) if spared else shares, after=after)

    running = [t for t in trials if t.state == "running"]
    work = [(n, n * costs.get(t.family, usual)) for t in running if (n := steps_of(t.family, t.default, t.step)) > 0]
    tail = max((seconds for _, seconds in work), default=0.0)
    free_steps = steps_of("", False)
    at_once = max(1, concurrent)
    seconds = count = math.inf
    folds = [[t for t in trials if t.fold == fold] for fold in range(course.folds)]
    if all(course.asked(fold) is not None for fold in folds):
        for fold, queue in itertools.zip_longest(folds, course.queues, fillvalue=()):
            known, others = _to_begin(course, fold, queue)
            sizes = [(steps_of(family, default), family) for family, default in known]
            work += [(n, n * costs.get(family, usual)) for n, family in sizes]
            work += [(free_steps, free_steps * usual_free)] * others
        count = len(work)
        seconds = max(sum(s for _, s in work) / at_once, max((s for _, s in work), default=0.0))
    bounds = [
        max((given * 3600 - used) / rate, tail)
        for given, used, rate in (
            (course.budget.hours, spent.seconds, 1.0),
            (course.budget.device_hours, spent.device_seconds, at_once * devices),
        )
        if given is not None
    ]
    if not costs:
        known_count = None if math.isinf(count) else count
        return Foresight(known_count, None if known_count is None else sum(n for n, _ in work), None, None)
    if min(bounds, default=math.inf) < seconds:
        seconds = min(bounds)
        count = seconds * at_once / max(free_steps * usual_free, 1e-9)
        return Foresight(count, count * free_steps, seconds, seconds * at_once * devices)
    return Foresight(count, sum(n for n, _ in work), seconds, sum(s for _, s in work) * devices)
