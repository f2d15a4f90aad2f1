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
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import TrialState

from dgsearch.domains.layout import DomainIndex, class_names
from dgsearch.randomness import seed_of
from dgsearch.recipe import encode
from dgsearch.search_space import SearchSpace
from dgsearch.study import Fold, Study, TrialRecord, append_line, drop_torn_line, read_lines, write_json
from dgsearch.train import Evaluation, StopTrial, evaluation_steps

RUNGS = (0.1, 0.3)  # shares of a trial's steps at which it may be stopped
REDUCTION = 3  # one in three goes on at each rung
FLOOR = 3  # trials a family has before the sampler chooses freely
SAMPLER_STARTUP = 10  # trials of a fold before the sampler models its families
FIELDS_STARTUP = 1  # trials of a family before the sampler models its fields: from its published defaults on

Report = Callable[[Evaluation], None]


@dataclass(frozen=True)
class Assignment:
    """A trial to run: what a worker is handed. It names source domains' index files and no other domain."""

    fold: int
    number: int
    recipe: dict[str, Any]
    sources: tuple[str, ...]  # paths of the source domains' index files
    folder: str  # of this session of the trial: checkpoint and weights


@dataclass(frozen=True)
class Outcome:
    """How a trial ended. ``weights`` is the name of a file in the assignment's folder."""

    state: str  # complete, pruned or failed
    reason: str = ""
    weights: str | None = None


Trial = Callable[[Assignment, Report], Outcome]


def run_guarded(trial: Trial, assignment: Assignment, report: Report) -> Outcome:
    """Run a trial; whatever it raises becomes an outcome, since a failing trial must not end a search."""
    try:
        return trial(assignment, report)
    except StopTrial:
        return Outcome("pruned")
    except Exception as error:  # a component may raise anything
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome("failed", f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})")


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


def rungs(steps: int) -> list[int]:
    """Return the steps at which a trial may be stopped: its evaluations at 10 % and 30 %."""
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


class FoldSearch:
    """One fold: its Optuna study, its rungs and its count of trials. Nothing crosses between folds."""

    def __init__(self, study: Study, fold: Fold, space: SearchSpace, *, session: str) -> None:
        self.study = study
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
        journal = str(self.folder / "journal.log")
        drop_torn_line(Path(journal))
        try:
            storage = JournalStorage(JournalFileBackend(journal, lock_obj=JournalFileOpenLock(journal)))
            self.optuna = optuna.create_study(
                storage=storage, study_name="fold", direction="maximize", load_if_exists=True
            )
        except json.JSONDecodeError as error:
            raise ValueError(f"the journal {journal} is damaged: {error}") from None
        self.families: list[str] = []  # of the trials begun, in order
        # A family's trials alone, in memory: what its fields are drawn from. In one model of all families, a weak
        # family has no good trials to learn from, and each ask would model every family's fields.
        self.models = {name: optuna.create_study(direction="maximize") for name in space.family_names}
        self.unfinished: deque[_Running] = deque()
        self._adopt()

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
            self.families.append(record.family)
            modelled = bool(frozen.params)
            if frozen.state != TrialState.RUNNING:
                if modelled:
                    self.models[record.family].add_trial(frozen)
                continue
            running = _Running(
                record,
                optuna.Trial(self.optuna, frozen._trial_id),
                self._drawn(record.family, record.number, frozen.params) if modelled else None,
                {e.step: e for e in record.evaluations},
                set(frozen.intermediate_values),
            )
            self.running[record.number] = running
            if record.result:
                self._tell(running, record.result["state"])
            elif self.stopped(record.number):
                self.tell(record.number, Outcome("pruned"))
            else:
                self.unfinished.append(running)

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
        earlier = [p for p in record.folder.glob("*/checkpoint.pt") if p.parent != folder]
        if earlier:
            # A copy: a worker of a dead session that still writes can't reach this session's folder.
            shutil.copy2(max(earlier), folder / "checkpoint.pt")
        sources = tuple(str(self.study.index_path(name).resolve()) for name in self.fold.sources)
        return Assignment(self.fold.number, record.number, record.recipe, sources, str(folder.resolve()))

    def _begin(self) -> _Running:
        number = len(self.optuna.get_trials(deepcopy=False))
        fixed = self._fixed()
        self.optuna.sampler = self._sampler(number, fixed)
        trial = self.optuna.ask()
        assert trial.number == number
        drawn = None
        if fixed is None:
            family, recipe = self._baseline, self.space.default_recipe()
        else:
            family = trial.suggest_categorical("family", self.space.family_names)
            drawn = self._drawn(family, number, fixed)
            self.optuna.sampler = self._sampler(number, drawn.params)
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
            },
        )
        self.families.append(family)
        record = TrialRecord(self.fold.number, number, family, encode(recipe), default, folder)
        self.running[number] = running = _Running(record, trial, drawn)
        return running

    def _drawn(self, family: str, number: int, fixed: dict[str, Any]) -> optuna.Trial:
        """Return a trial of a family's model, all its fields drawn."""
        model = self.models[family]
        model.sampler = self._sampler(number, fixed | {"family": family}, joint=True)
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
        first = self._order[0]
        return first if self.space.family(first).is_plain else "erm"

    @property
    def _defaults(self) -> int:
        """How many trials are defaults: one a family, and plain ERM where no family is that."""
        return len({*self._order, self._baseline})

    def _fixed(self) -> dict[str, Any] | None:
        """Return the parameters that the next trial must have; None for the baseline outside the space."""
        begun = len(self.families)
        if begun < self._defaults:
            offset = self._defaults - len(self._order)
            return None if begun < offset else self.space.default_parameters(self._order[begun - offset])
        least = min(self._order, key=self.families.count)
        return {"family": least} if self.families.count(least) < FLOOR else {}

    def _sampler(
        self, number: int, fixed: dict[str, Any] | None, *, joint: bool = False
    ) -> optuna.samplers.BaseSampler:
        """Return a sampler of its own for each trial: a restart neither replays a stream nor loses it.

        ``joint`` is of a family's fields, and not of the family.
        """
        seed = seed_of(self.study.specification.seed, *self.fold.sources, number) % 2**32
        startup = FIELDS_STARTUP if joint else SAMPLER_STARTUP
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=startup, multivariate=joint, group=joint, constant_liar=True
            )
            return optuna.samplers.PartialFixedSampler(fixed, sampler) if fixed else sampler

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
            spared = record.default and (record.family == self._baseline or step == self.rungs[0])
            stop = not spared and stops(value, [*self.recorded[step], value])
            line = {"trial": record.number, "step": step, "value": value, "stop": stop}
            append_line(self.folder / "verdicts.jsonl", line)
            self._take(line)
        return self.verdicts[record.number, step]

    def stopped(self, number: int) -> bool:
        """Whether a verdict has stopped a trial."""
        return any(stop for (trial, _), stop in self.verdicts.items() if trial == number)

    # -- tell

    def tell(self, number: int, outcome: Outcome) -> TrialRecord:
        """Record how a trial ended, then tell Optuna."""
        running = self.running[number]
        folder = running.record.folder
        weights = None if outcome.weights is None else f"{self.session}/{outcome.weights}"
        result = {"state": outcome.state, "reason": outcome.reason, "weights": weights}
        write_json(folder / "result.json", result)
        self._tell(running, outcome.state)
        for file in folder.glob("*/checkpoint.pt"):
            file.unlink()
        return self.study.trial(self.fold.number, number)

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


class Engine:
    """The search over all folds of a study, which share the workers: the fold with the fewest trials is next."""

    def __init__(
        self,
        study: Study,
        space: SearchSpace,
        *,
        trials: int,
        on_event: Callable[[str, TrialRecord], None] = lambda kind, record: None,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        if trials < 1:
            raise ValueError(f"a search needs at least 1 trial a fold, not {trials}")
        self.study = study
        self.trials = trials
        self.on_event = on_event
        self.session = self._begin_session()
        self.folds = [FoldSearch(study, fold, space, session=self.session) for fold in study.folds]

    def _begin_session(self) -> str:
        folder = self.study.path / "sessions"
        folder.mkdir(exist_ok=True)
        number = 1 + max((int(p.name) for p in folder.iterdir()), default=0)
        (folder / f"{number:04d}").mkdir()
        return f"{number:04d}"

    def ask(self) -> Assignment | None:
        """Return the next trial to run, an interrupted one first; None when there is none left to begin."""
        waiting = [fold for fold in self.folds if fold.unfinished]
        open_ = [fold for fold in self.folds if len(fold.families) < self.trials]
        if not waiting and not open_:
            return None
        fold = waiting[0] if waiting else min(open_, key=lambda f: len(f.families))
        assignment = fold.ask()
        self.on_event("begin", fold.running[assignment.number].record)
        return assignment

    def report(self, fold: int, number: int, evaluation: Evaluation) -> bool:
        """Record an evaluation; return whether the trial is to stop."""
        return self.folds[fold].report(number, evaluation)

    def stopped(self, fold: int, number: int) -> bool:
        """Whether a verdict has stopped a trial."""
        return self.folds[fold].stopped(number)

    def tell(self, fold: int, number: int, outcome: Outcome) -> None:
        """Record how a trial ended."""
        self.on_event("end", self.folds[fold].tell(number, outcome))

    @property
    def left(self) -> int:
        """How many trials are still to end."""
        ended = sum(len(fold.families) - len(fold.running) for fold in self.folds)
        return sum(max(self.trials, len(fold.families)) for fold in self.folds) - ended
