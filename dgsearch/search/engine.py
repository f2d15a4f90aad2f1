"""The search itself: ask, report → go on or stop, tell. Knows Optuna; knows neither Ray nor training.

The study directory is the record and Optuna's journal a projection of it: whatever is decided is written
to the study before it is acted on, so that a driver killed at any moment can be followed by another.
"""

import contextlib
import importlib.metadata
import json
import math
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import TrialState

from dgsearch.component import known_or_raise
from dgsearch.domains.layout import DomainIndex, class_names
from dgsearch.randomness import seed_of
from dgsearch.recipe import Recipe, encode
from dgsearch.search.budget import Budget, Meter
from dgsearch.search.retention import KEEP, Complete, kept, selected, tidy
from dgsearch.search_space import SearchSpace
from dgsearch.study import (
    Fold,
    Study,
    TrialRecord,
    append_line,
    drop_torn_line,
    read_lines,
    storage_fault,
    write_json,
)
from dgsearch.train import CHECKPOINTS, RESUMED, DivergedError, Evaluation, StopTrial, evaluation_steps, read_checkpoint

RUNGS = (0.2, 0.4)  # shares of a trial's steps at which it may be stopped
REDUCTION = 3  # one in three goes on at each rung
FLOOR = 3  # trials that every family has at least
IN_TURN = 3  # of so many trials one is a floor's, until every family has its floor
SAMPLERS = ("tpe", "random")
SAMPLER_STARTUP = 10  # trials of a fold before the sampler models its families
FIELDS_STARTUP = 2  # trials of a family before the sampler models its fields: the published defaults and one more
REDRAWS = 100  # of a family, until one that is not given up
OUT_OF_MEMORY = "out of memory"

Report = Callable[[Evaluation], None]


@dataclass(frozen=True)
class Assignment:
    """A trial to run: what a worker is handed. It names source domains' index files and no other domain."""

    fold: int
    number: int
    recipe: dict[str, Any]
    sources: tuple[str, ...]  # paths of the source domains' index files
    folder: str  # of this session of the trial: checkpoint and weights
    whole_device: bool = False  # it ran out of memory before, sharing one


@dataclass(frozen=True)
class Outcome:
    """How a trial ended. ``weights`` is the name of a file in the assignment's folder.

    ``unfinished`` is no end: the storage took nothing more, which ends the session.
    """

    state: str  # complete, pruned, failed or unfinished
    reason: str = ""  # one line
    weights: str | None = None
    kind: str = ""  # of a failure: diverged, error, out of memory or worker lost


Trial = Callable[[Assignment, Report], Outcome]


def run_guarded(trial: Trial, assignment: Assignment, report: Report) -> Outcome:
    """Run a trial; whatever it raises becomes an outcome, since a failing trial must not end a search."""
    try:
        return trial(assignment, report)
    except StopTrial:
        return Outcome("pruned")
    except Exception as error:  # a component may raise anything
        if isinstance(error, OSError) and (fault := storage_fault(error)) is not None:
            return Outcome("unfinished", fault)
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = (str(error).splitlines() or [""])[0]
        reason = f"{type(error).__name__}: {said} ({Path(where.filename).name}:{where.lineno})"
        return Outcome("failed", reason, kind=failure_kind(error))


def failure_kind(error: Exception) -> str:
    """Return what kind of failure an exception in a trial is."""
    if isinstance(error, DivergedError):
        return "diverged"
    said = str(error).lower()
    memory = "out of memory" in said or "can't allocate memory" in said or "alloc_failed" in said
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and memory):
        return OUT_OF_MEMORY
    return "error"


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGUSR1 (Slurm's notice) end what runs inside as Ctrl-C does."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, interrupt) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def stops(value: float, recorded: list[float]) -> bool:
    """Whether successive halving stops a trial, given all values recorded at its rung, its own included.

    It goes on among the best max(1, ⌈n/3⌉), ties included (Li et al. 2020, arXiv:1810.05934).
    """
    keep = max(1, math.ceil(len(recorded) / REDUCTION))
    return value < sorted(recorded, reverse=True)[keep - 1]


def baseline(space: SearchSpace) -> str:
    """Return the family of plain ERM, whose default is never stopped; ``erm`` where the space has none."""
    return next((family.name for family in space.families if family.is_plain), "erm")


def default_recipes(space: SearchSpace) -> dict[str, Recipe]:
    """Return each family's default recipe, plain ERM's first."""
    found = {baseline(space): space.default_recipe()}
    for name in space.family_names:
        found.setdefault(name, space.suggest(optuna.trial.FixedTrial(space.default_parameters(name)))[1])
    return {name: recipe.resolve(space.network) for name, recipe in found.items()}


def not_given_up(families: Sequence[str], *, begun: Iterable[str], failed: Iterable[str]) -> list[str]:
    """Return the families not given up, by those of a fold's trials; one is when every trial of it so far failed."""
    trials, failures = Counter(begun), Counter(failed)
    return [name for name in families if not failures[name] or trials[name] > failures[name]]


def floors_turn(begun: int) -> bool:
    """Return whether the trial that follows so many of its fold is for a family that lacks its floor, if one does."""
    return begun % IN_TURN == 0


def rungs(steps: int) -> list[int]:
    """Return the steps at which a trial may be stopped: its evaluations at 20 % and 40 %."""
    at = evaluation_steps(steps)
    found = {next(step for step in at if step >= share * steps) for share in RUNGS}
    return sorted(found - {steps})


@dataclass
class _Running:
    """A trial in the engine's hands."""

    record: TrialRecord
    trial: optuna.Trial
    drawn: optuna.Trial | None = None  # the same in its family's model; none for a baseline outside the space
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    reported: set[int] = field(default_factory=set)


class _AmongRemaining(optuna.samplers.BaseSampler):
    """A sampler whose families given up are drawn no more: a draw of one is drawn again.

    A categorical parameter keeps its choices for as long as an Optuna study lasts, so they can't be taken out.
    """

    def __init__(self, sampler: optuna.samplers.BaseSampler, remaining: Sequence[str]) -> None:
        self.sampler = sampler
        self.remaining = remaining

    def infer_relative_search_space(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
        return self.sampler.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial, search_space: dict[str, Any]
    ) -> dict[str, Any]:
        return self.sampler.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial, param_name: str, param_distribution: Any
    ) -> Any:
        for _ in range(REDRAWS):
            found = self.sampler.sample_independent(study, trial, param_name, param_distribution)
            if param_name != "family" or found in self.remaining:
                return found
        return self.remaining[0]


class FoldSearch:
    """One fold: its Optuna study, its rungs and its count of trials. Nothing crosses between folds.

    ``enqueue`` is the one way in for what was found elsewhere; who calls it answers for what may flow.
    """

    def __init__(
        self,
        study: Study,
        fold: Fold,
        space: SearchSpace,
        *,
        session: str,
        floor: int = FLOOR,
        sampler: str = "tpe",
        keep: str = "best",
    ) -> None:
        self.floor = floor
        self.sampler = sampler
        self.study = study
        self.keep = keep
        self.complete: dict[int, Complete] = {}
        self.weighty: set[int] = set()  # complete trials whose weights are there
        self.fold = fold
        self.space = space
        self.session = session
        self.folder = study.fold_dir(fold.number)
        self.folder.mkdir(parents=True, exist_ok=True)
        specification = study.specification
        self.steps = specification.steps
        self.rungs = rungs(self.steps)
        indexes = [DomainIndex.load(study.index_path(name)) for name in fold.sources]
        self.chance = 1 / len(class_names(indexes))
        self.verdicts: dict[tuple[int, int], bool] = {}  # (trial, step) → stopped
        self.recorded: dict[int, list[float]] = {step: [] for step in self.rungs}
        for line in read_lines(self.folder / "verdicts.jsonl"):
            self._take(line)
        self.running: dict[int, _Running] = {}
        self.queue = study.queue(fold.number)
        self.queued = 0  # how much of the queue is used up
        journal = str(self.folder / "journal.log")
        drop_torn_line(Path(journal))
        Path(f"{journal}.lock").unlink(missing_ok=True)  # of a killed driver: this one is the only one now
        try:
            storage = JournalStorage(JournalFileBackend(journal, lock_obj=JournalFileOpenLock(journal)))
            self.optuna = optuna.create_study(
                storage=storage, study_name="fold", direction="maximize", load_if_exists=True
            )
        except json.JSONDecodeError as error:
            raise ValueError(f"the journal {journal} is damaged: {error}") from None
        self.families: list[str] = []  # of the trials begun, in order
        self.failures: list[str] = []  # the families of the trials that failed
        # A family's trials alone, in memory: what its fields are drawn from. In one model of all families, a weak
        # family has no good trials to learn from, and each ask would model every family's fields.
        self.models = {name: optuna.create_study(direction="maximize") for name in space.family_names}
        self.unfinished: deque[_Running] = deque()
        self._adopt()
        self._retain([t for t in study.trials(fold.number) if t.result])

    # -- what an earlier session left

    def _adopt(self) -> None:
        """Bring Optuna up to the study: tell what ended, forget what never began, take up the rest."""
        for frozen in self.optuna.get_trials(deepcopy=False):
            if frozen.state == TrialState.FAIL:
                continue
            if not (self.study.trial_dir(self.fold.number, frozen.number) / "trial.json").exists():
                self.optuna.tell(frozen.number, state=TrialState.FAIL)
                continue
            record = self.study.trial(self.fold.number, frozen.number)
            self._count(record)
            if frozen.state != TrialState.RUNNING:
                if frozen.params:
                    self.models[record.family].add_trial(frozen)
                continue
            trial, drawn = optuna.Trial(self.optuna, frozen._trial_id), None
            if record.family in self.models:
                # By the record: a journal cut in half may lack the last parameter.
                parameters = self.space.parameters_of(record.family, record.recipe)
                assert parameters is not None and parameters["family"] == record.family
                self.optuna.sampler = self._sampler(parameters)
                self.space.suggest(trial)
                drawn = self._drawn(record.family, parameters)
            evaluations = {e.step: e for e in record.evaluations}
            running = _Running(record, trial, drawn, evaluations, set(frozen.intermediate_values))
            self.running[record.number] = running
            if record.result:
                self._tell(running, record.result["state"])
            elif self.stopped(record.number):
                self.tell(record.number, Outcome("pruned"))
            else:
                self.unfinished.append(running)

    def _count(self, record: TrialRecord) -> None:
        self.families.append(record.family)
        if record.state == "failed":
            self.failures.append(record.family)
        if record.queued is not None:
            self.queued = max(self.queued, record.queued + 1)

    def _take(self, line: dict[str, Any]) -> None:
        self.verdicts[line["trial"], line["step"]] = line["stop"]
        self.recorded[line["step"]].append(line["value"])

    # -- ask

    def ask(self) -> Assignment:
        """Return an unfinished trial, or begin a new one."""
        running = self.unfinished.popleft() if self.unfinished else self._begin()
        record = running.record
        folder = record.folder / self.session
        folder.mkdir(parents=True, exist_ok=True)
        sessions = sorted((p for p in record.folder.iterdir() if p.is_dir()), reverse=True)
        there = [[file for name in CHECKPOINTS if (file := p / name).exists()] for p in sessions]
        there = [files for files in there if files]
        whole = (files for files in there if any(read_checkpoint(file) is not None for file in files))
        for file in next(whole, there[0] if there else []):
            # A copy: a worker of a dead session that still writes can't reach this session's folder. A damaged
            # one comes along, so that the trial says what it passed over.
            if file.parent != folder:  # as it is where the trial is tried again in the session
                shutil.copyfile(file, folder / file.name)
        sources = tuple(str(self.study.index_path(name).resolve()) for name in self.fold.sources)
        return Assignment(
            self.fold.number, record.number, record.recipe, sources, str(folder.resolve()), record.whole_device
        )

    def _begin(self) -> _Running:
        number = len(self.optuna.get_trials(deepcopy=False))
        queued, fixed = self._fixed()
        self.optuna.sampler = self._sampler(fixed)
        trial = self.optuna.ask()
        assert trial.number == number
        drawn = None
        if fixed is None:
            family, recipe = self._baseline, self.space.default_recipe()
        else:
            family = trial.suggest_categorical("family", self.space.family_names)
            drawn = self._drawn(family, fixed)
            self.optuna.sampler = self._sampler(drawn.params)
            family, recipe = self.space.suggest(trial)
        recipe = recipe.resolve(self.space.network)
        default = len(self.families) < self._defaults
        folder = self.study.trial_dir(self.fold.number, number)
        specification = self.study.specification
        write_json(
            folder / "trial.json",
            {
                "family": family,
                "recipe": encode(recipe),
                "default": default,
                "fold": self.fold.number,
                "sources": list(self.fold.sources),
                "network": specification.network,
                "steps": specification.steps,
                "resolution": specification.resolution,
                "seed": specification.seed,
                "threads": specification.threads,
                "precision": specification.precision,
                "versions": {n: importlib.metadata.version(n) for n in ("dgsearch", "torch", "numpy", "pillow")},
                "queued": queued,
            },
        )
        record = TrialRecord(self.fold.number, number, family, encode(recipe), default, folder, queued=queued)
        self._count(record)
        self.running[number] = running = _Running(record, trial, drawn)
        return running

    def _drawn(self, family: str, fixed: dict[str, Any]) -> optuna.Trial:
        """Return a trial of a family's model, all its fields drawn."""
        model = self.models[family]
        model.sampler = self._sampler(fixed | {"family": family}, joint=True)
        drawn = model.ask()
        self.space.suggest(drawn)
        return drawn

    @property
    def _order(self) -> list[str]:
        """Families whose defaults run first, plain ERM before all."""
        return sorted(self.space.family_names, key=lambda name: not self.space.family(name).is_plain)

    @property
    def _baseline(self) -> str:
        """The family of plain ERM, whose default is never stopped; ``erm`` where the space has none."""
        return baseline(self.space)

    @property
    def _defaults(self) -> int:
        """How many trials are defaults: one a family, and plain ERM where no family is that."""
        return len({*self._order, self._baseline})

    @property
    def remaining(self) -> list[str]:
        """The families not given up."""
        return not_given_up(self._order, begun=self.families, failed=self.failures)

    @property
    def past_defaults(self) -> bool:
        """Whether every family's defaults have begun."""
        return len(self.families) >= self._defaults

    def enqueue(self, origin: str, found: Sequence[Mapping[str, Any]]) -> None:
        """Give parameters to trials that follow the defaults; once from each origin, and each set once."""
        if origin in self.queue["origins"]:
            return
        known = [*map(self.space.default_parameters, self._order), *self.queue["parameters"]]
        new = [dict(parameters) for parameters in found if parameters not in known]
        queue = {
            "origins": [*self.queue["origins"], origin],
            "parameters": [*self.queue["parameters"], *new],
        }
        write_json(self.folder / "queue.json", queue)
        self.queue = queue

    def _fixed(self) -> tuple[int | None, dict[str, Any] | None]:
        """Return the parameters that the next trial must have, and their place in the queue if they are from there.

        None are those of the baseline outside the space.
        """
        begun = len(self.families)
        if begun < self._defaults:
            offset = self._defaults - len(self._order)
            return None, None if begun < offset else self.space.default_parameters(self._order[begun - offset])
        remaining = self.remaining
        queue = self.queue["parameters"]
        for place in range(self.queued, len(queue)):
            if queue[place]["family"] in remaining:
                return place, queue[place]
        least = min(remaining, key=self.families.count)
        owed = self.families.count(least) < self.floor and floors_turn(begun)
        return None, {"family": least} if owed else {}

    def _sampler(self, fixed: dict[str, Any] | None, *, joint: bool = False) -> optuna.samplers.BaseSampler:
        """Return a sampler of its own for each trial: a restart neither replays a stream nor loses it.

        Its seed counts the trials begun, so that one in the place of a trial that never began is the same. ``joint``
        is of a family's fields, and not of the family.
        """
        seed = seed_of(self.study.specification.seed, *self.fold.sources, len(self.families)) % 2**32
        startup = FIELDS_STARTUP if joint else SAMPLER_STARTUP
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler: optuna.samplers.BaseSampler = (
                optuna.samplers.RandomSampler(seed=seed)
                if self.sampler == "random"
                else optuna.samplers.TPESampler(
                    seed=seed, n_startup_trials=startup, multivariate=joint, group=joint, constant_liar=True
                )
            )
            if fixed:
                return optuna.samplers.PartialFixedSampler(fixed, sampler)
            remaining = self.remaining
            return sampler if joint or len(remaining) == len(self._order) else _AmongRemaining(sampler, remaining)

    # -- report

    def report(self, number: int, evaluation: Evaluation) -> bool:
        """Record an evaluation; return whether the trial is to stop. An evaluation reported twice counts once."""
        running = self.running[number]
        step = evaluation.step
        if step not in running.evaluations:
            append_line(running.record.folder / "evaluations.jsonl", asdict(evaluation))
            running.evaluations[step] = evaluation
        best = max(e.mean for s, e in running.evaluations.items() if s <= step)
        stop = self._verdict(running.record, step, best) if step in self.recorded else False
        if step not in running.reported:
            running.trial.report(best, step)
            running.reported.add(step)
        return stop

    def _verdict(self, record: TrialRecord, step: int, value: float) -> bool:
        if (record.number, step) not in self.verdicts:
            spared = record.default and record.family == self._baseline
            stop = not spared and stops(value, [*self.recorded[step], value])
            line = {"trial": record.number, "step": step, "value": value, "stop": stop}
            append_line(self.folder / "verdicts.jsonl", line)
            self._take(line)
        return self.verdicts[record.number, step]

    def stopped(self, number: int) -> bool:
        """Whether a verdict has stopped a trial."""
        return any(self.verdicts.get((number, step)) for step in self.rungs)

    # -- tell

    def tell(self, number: int, outcome: Outcome) -> TrialRecord:
        """Record how a trial ended, then tell Optuna; one that ran out of memory is to be tried once more.

        Raises:
            ValueError: if it has not ended, because nothing more could be written.
        """
        running = self.running[number]
        folder = running.record.folder
        if outcome.state == "unfinished":
            raise ValueError(outcome.reason)
        if outcome.kind == OUT_OF_MEMORY and not running.record.whole_device:
            write_json(folder / "retry.json", {"reason": outcome.reason, "whole_device": True})
            running.record = replace(running.record, whole_device=True)
            self.unfinished.append(running)
            return running.record
        weights = None if outcome.weights is None else f"{self.session}/{outcome.weights}"
        result = {"state": outcome.state, "reason": outcome.reason, "kind": outcome.kind, "weights": weights}
        write_json(folder / "result.json", result | _resumptions(folder))
        self._tell(running, outcome.state)
        if outcome.state == "failed":
            self.failures.append(running.record.family)
        record = self.study.trial(self.fold.number, number)
        self._retain([record])
        return record

    def _retain(self, ended: list[TrialRecord]) -> None:
        """Leave of trials that ended what is kept, and drop weights that they displace. Twice changes nothing."""
        self.complete |= {t.number: Complete.of(t) for t in ended if t.state == "complete"}
        everything = set(self.complete)
        keep = everything if self.keep == "all" else kept(self.complete.values()) | selected(self.study, self.fold)
        displaced = (self.weighty - keep) - {t.number for t in ended}
        for record in (*ended, *(self.study.trial(self.fold.number, n) for n in displaced)):
            tidy(record, keep_weights=record.number in keep)
        self.weighty = everything & keep

    def _tell(self, running: _Running, state: str) -> None:
        trial = running.trial
        for step in sorted(set(running.evaluations) - running.reported):
            trial.report(max(e.mean for s, e in running.evaluations.items() if s <= step), step)
        if state == "complete":
            self.optuna.tell(trial, max(e.mean for e in running.evaluations.values()))
        else:
            if state == "failed":
                # Optuna refuses a value with FAIL, and its sampler ignores FAIL trials and proposes the same
                # place again: so a failed trial is one that was pruned at chance level.
                trial.report(self.chance, max(running.evaluations, default=0) + 1)
            self.optuna.tell(trial, state=TrialState.PRUNED)
        if (drawn := running.drawn) is not None:
            ended = self.optuna.get_trials(deepcopy=False)[trial.number]
            for step, value in ended.intermediate_values.items():
                drawn.report(value, step)
            self.models[running.record.family].tell(drawn, ended.value if state == "complete" else None, ended.state)
        del self.running[running.record.number]


def _resumptions(folder: Path) -> dict[str, Any]:
    """Return from which steps a trial went on, where it did, and a note if checkpoints were damaged."""
    lines = [line for file in sorted(folder.glob(f"*/{RESUMED}")) for line in read_lines(file)]
    if not lines:
        return {}
    found: dict[str, Any] = {"resumed_from": [line["step"] for line in lines]}
    damaged = [line["step"] for line in lines if line["damaged"]]
    if damaged:
        found["note"] = "a damaged checkpoint was passed over: it went on from step " + ", ".join(map(str, damaged))
    return found


class Engine:
    """The search over all folds of a study, which share the workers: the fold with the fewest trials is next.

    A fold that holds nothing out goes beyond its defaults when the others have begun all their trials, if trials alone
    end the search, and takes the best recipe of each.
    """

    def __init__(
        self,
        study: Study,
        space: SearchSpace,
        *,
        trials: int | None = None,
        hours: float | None = None,
        device_hours: float | None = None,
        floor: int = FLOOR,
        sampler: str = "tpe",
        devices: float = 1.0,
        keep: str = "best",
        on_event: Callable[[str, TrialRecord], None] = lambda kind, record: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        if floor < 0:
            raise ValueError(f"the floor is a number of trials a family, not {floor}")
        known_or_raise("sampler", sampler, SAMPLERS)
        known_or_raise("choice of weights to keep", keep, KEEP)
        self.budget = Budget(trials, hours, device_hours)
        self.study = study
        self.on_event = on_event
        self.fault: Exception | None = None
        self.session = study.begin_session()
        self.meter = Meter(study, self.session, devices=devices, clock=clock)
        self.folds = [
            FoldSearch(study, fold, space, session=self.session, floor=floor, sampler=sampler, keep=keep)
            for fold in study.folds
        ]

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Do what writes to the record. After a fault in it nothing is written any more: the session is over."""
        if self.fault is not None:
            raise self.fault
        try:
            self.study.check_driver()
            yield
        except Exception as error:
            self.fault = error
            raise

    def close(self) -> None:
        """Write what the session has used, unless another driver has followed: then it slept, and used nothing."""
        with contextlib.suppress(ValueError):
            self.study.check_driver()
            self.meter.write()

    def _open(self, fold: FoldSearch) -> bool:
        """Whether a fold still has a trial to begin."""
        return len(fold.families) < self._trials and bool(fold.remaining)

    def _is_waiting(self, fold: FoldSearch) -> bool:
        """Whether a fold that takes others' recipes is to wait for these: hours may end before the others do."""
        return self._takes(fold) and self.budget.hours is None and self.budget.device_hours is None

    def _takes(self, fold: FoldSearch) -> bool:
        """Whether a fold's next trials may have the recipes of others."""
        return not fold.fold.held_out and fold.past_defaults

    def ask(self) -> Assignment | None:
        """Return the next trial to run, an interrupted one first.

        None when there is none left to begin, or hours or device-hours are used up: running trials go on to their end,
        interrupted ones wait for a larger budget. It may be followed by another trial as long as trials run: one of
        them may have to be tried again.
        """
        with self._writing():
            if self.ended_by is not None:
                return None
            waiting = [fold for fold in self.folds if fold.unfinished]
            open_ = [fold for fold in self.folds if self._open(fold)]
            fold = waiting[0] if waiting else min(open_, key=lambda f: (self._is_waiting(f), len(f.families)))
            if not waiting and self._takes(fold):
                self._collect(fold)
            assignment = fold.ask()
            self.meter.begin((assignment.fold, assignment.number), whole_device=assignment.whole_device)
            self.on_event("begin", fold.running[assignment.number].record)
        return assignment

    def _collect(self, fold: FoldSearch) -> None:
        """Queue the trial that is the best of each other fold by now, once: into a fold that holds nothing out."""
        for other in self.folds:
            if not other.fold.held_out or not other.complete:
                continue
            number = max(other.complete.values(), key=lambda t: (t.scores, -t.number)).number
            origin = f"fold {other.fold.number} trial {number}"
            if origin not in fold.queue["origins"]:
                best = self.study.trial(other.fold.number, number)
                parameters = fold.space.parameters_of(best.family, best.recipe)
                fold.enqueue(origin, [] if parameters is None else [parameters])

    def report(self, fold: int, number: int, evaluation: Evaluation) -> bool:
        """Record an evaluation; return whether the trial is to stop."""
        with self._writing():
            known = self.folds[fold].running[number].evaluations
            if evaluation.step not in known:
                seconds = evaluation.seconds - max((e.seconds for e in known.values()), default=0)
                self.meter.evaluated((fold, number), seconds)
            return self.folds[fold].report(number, evaluation)

    def stopped(self, fold: int, number: int) -> bool:
        """Whether a verdict has stopped a trial."""
        return self.folds[fold].stopped(number)

    def tell(self, fold: int, number: int, outcome: Outcome) -> None:
        """Record how a trial ended. Events: ``end``, or ``retry``; and ``given up`` where its family is."""
        with self._writing():
            before = self.folds[fold].remaining
            record = self.folds[fold].tell(number, outcome)
            self.meter.end((fold, number), failed=outcome.state == "failed")
            self.on_event("end" if record.result else "retry", record)
            if record.family in before and record.family not in self.folds[fold].remaining:
                self.on_event("given up", record)

    @property
    def _trials(self) -> int:
        return sys.maxsize if self.budget.trials is None else self.budget.trials

    @property
    def ended_by(self) -> str | None:
        """What leaves no room for another trial: a budget, or ``families``, all given up in each fold; else None."""
        if any(fold.unfinished or self._open(fold) for fold in self.folds):
            return self.budget.used_up(self.meter.spent())
        return "trials" if any(fold.remaining for fold in self.folds) else "families"

    @property
    def left(self) -> int:
        """How many trials are still to end; more than can be where their number is not bounded."""
        running = sum(len(fold.running) - len(fold.unfinished) for fold in self.folds)
        if self.ended_by is not None:
            return running
        to_begin = sum(max(0, self._trials - len(fold.families)) for fold in self.folds if self._open(fold))
        return min(sys.maxsize, to_begin + sum(len(fold.running) for fold in self.folds))
