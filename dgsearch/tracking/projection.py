"""Projection: a study shown in MLflow; it may be sent again at any time, and only what is new changes anything."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgsearch.study import Fold, Study, TrialRecord, read_json
from dgsearch.tracking.describe import (
    Description,
    Ended,
    Figures,
    Point,
    best_points,
    experiment_name,
    fold_description,
    in_order,
    milliseconds,
    note,
    trial_description,
    trial_figures,
)
from dgsearch.tracking.store import (
    alone,
    artifacts,
    connect,
    default_uri,
    is_database,
    rehome,
    resolve_uri,
    shown,
    study_id,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

STATUS = {"complete": "FINISHED", "pruned": "FINISHED", "failed": "FAILED"}
BATCH = 800  # metric points a request; MLflow takes 1,000 points, parameters and tags together
PAGE = 1000  # runs a request
NOTE = "mlflow.note.content"


@dataclass(frozen=True)
class Projected:
    """What a store shows of a study. ``problems`` names the records that could not be read, a line each."""

    uri: str
    experiment: str
    experiment_id: str
    trials: int
    problems: tuple[str, ...] = ()


@dataclass
class _Sent:
    """A run in the store, and what is known to be in it."""

    id: str
    name: str
    start: int  # milliseconds
    status: str
    tags: dict[str, str]
    params: frozenset[str] = frozenset()
    described: bool = False  # its parameters and tags are sent
    steps: set[int] = field(default_factory=set)  # of the evaluations sent, or of the trials counted


def project(study: Study, uri: str | None = None) -> Projected:
    """Show a study in MLflow, whole: as if it had been sent from the start.

    Raises:
        ValueError: if the store can't be reached or refuses; what it took remains, and sending again goes on.
    """
    return Projection(study, uri).sync()


class Projection:
    """A study and the store that shows it; each ``sync`` sends what is new.

    The runs of a study are found by their tags, so it does not matter who made them. Runs of this study that
    were deleted by hand come back.
    """

    def __init__(self, study: Study, uri: str | None = None) -> None:
        self.study = study
        self.uri = resolve_uri(study, uri)
        self._client: MlflowClient | None = None
        self._forget()

    def _forget(self) -> None:
        """Know nothing of the store any more: the next sync looks what is there."""
        self._experiment = ""
        self._name = ""
        self._note: str | None = None
        self._runs: dict[tuple[int, int | None], _Sent] = {}  # (fold, trial), or (fold, None) of a fold's own
        self._ended: dict[int, dict[int, Ended]] = {fold.number: {} for fold in self.study.folds}
        self._just_looked = False

    def sync(self) -> Projected:
        """Send what the store does not show yet.

        Raises:
            ValueError: if the store can't be reached or refuses, in one line.
        """
        try:
            with alone(self.study):
                return self._sync()
        except Exception as error:
            self._forget()
            where = f"MLflow at {shown(self.uri)} did not take {self.study.path}"
            raise ValueError(f"{where}: {_reason(error)}") from error

    def _sync(self) -> Projected:
        if self._client is None:
            self._client = connect(self.uri)
        self._id = study_id(self.study)
        self._problems: list[str] = []
        self._just_looked = not self._experiment
        if not self._experiment:
            self._open_experiment()
            self._look()
        for fold in self.study.folds:
            self._send_fold(fold)
        self._send_note()
        self._send_selection()
        self._send_evaluation()
        trials = sum(trial is not None for _, trial in self._runs)
        return Projected(self.uri, self._name, self._experiment, trials, tuple(self._problems))

    @property
    def client(self) -> "MlflowClient":
        """The store's client."""
        assert self._client is not None
        return self._client

    # -- what is there

    def _open_experiment(self) -> None:
        from mlflow.entities import ViewType

        mine = f"tags.`dgsearch.study` = '{self._id}'"
        found = self.client.search_experiments(view_type=ViewType.ALL, filter_string=mine)
        place = artifacts(self.study).as_uri() if is_database(self.uri) else None
        if not found:
            name = experiment_name(self.study)
            if self.client.get_experiment_by_name(name) is not None:
                name = f"{name} ({self._id})"
            tags = {
                "dgsearch.study": self._id,
                "mlflow.experiment.primaryMetric.name": "val/accuracy",
                "mlflow.experiment.primaryMetric.greaterIsBetter": "True",
            }
            self._experiment = self.client.create_experiment(name, artifact_location=place, tags=tags)
            self._name = name
            return
        experiment = min(found, key=lambda e: e.creation_time or 0)
        if experiment.lifecycle_stage != "active":
            self.client.restore_experiment(experiment.experiment_id)
        old = experiment.artifact_location
        if place is not None and old != place and self._is_default:
            rehome(self.study, old, place)
        self._experiment, self._name = experiment.experiment_id, experiment.name
        self._note = experiment.tags.get(NOTE)

    @property
    def _is_default(self) -> bool:
        try:
            return self.uri == default_uri(self.study)
        except ValueError:
            return False

    def _search(self, *, trial: tuple[int, int | None] | None = None) -> "list[Run]":
        """Return the runs of the study, or of one trial or fold of it, those deleted by hand included."""
        from mlflow.entities import ViewType

        wanted = {"study": self._id}
        if trial is not None:
            wanted |= {"fold": str(trial[0])} | ({} if trial[1] is None else {"trial": str(trial[1])})
        condition = " and ".join(f"tags.`dgsearch.{key}` = '{value}'" for key, value in wanted.items())
        found: list[Run] = []
        token: str | None = None
        while True:
            page = self.client.search_runs(
                [self._experiment], condition, ViewType.ALL, max_results=PAGE, page_token=token
            )
            found += page
            token = page.token
            if not token:
                return found

    def _look(self, *, trial: tuple[int, int | None] | None = None) -> None:
        """Take up the runs that are there. Of two of one trial the first stays, and a deleted one comes back."""
        runs = self._search(trial=trial)
        for run in sorted(runs, key=lambda r: (r.info.lifecycle_stage != "active", r.info.run_id)):
            fold, number = (run.data.tags.get(f"dgsearch.{name}") for name in ("fold", "trial"))
            key = (int(fold or -1), None if number is None else int(number))
            if fold is None or trial not in (None, key):
                continue
            deleted = run.info.lifecycle_stage != "active"
            if key in self._runs:
                if not deleted:
                    self.client.delete_run(run.info.run_id)
                continue
            if deleted:
                self.client.restore_run(run.info.run_id)
            self._take(key, run)

    def _take(self, key: tuple[int, int | None], run: "Run") -> None:
        info, tags, metrics = run.info, run.data.tags, run.data.metrics
        params = frozenset(run.data.params)
        sent = _Sent(info.run_id, info.run_name or "", info.start_time, info.status, dict(tags), params)
        self._runs[key] = sent
        fold, trial = key
        if trial is None:
            history = self.client.get_metric_history(sent.id, "best/val_accuracy")
            sent.steps = {point.step for point in history}
        elif (state := tags.get("dgsearch.state", "")) in STATUS and info.status == STATUS[state]:
            # The status is the last that is sent of a trial, so nothing of it is missing.
            seconds = metrics.get("cost/seconds", 0.0)
            accuracy = metrics.get("val/accuracy")
            self._ended.setdefault(fold, {})[trial] = Ended(
                trial, sent.name, state, accuracy, seconds, info.end_time or 0
            )

    def _known(self, key: tuple[int, int | None]) -> _Sent | None:
        """Return a run that is there; another process may have made it since the last look."""
        if key not in self._runs and not self._just_looked:
            self._look(trial=key)
        return self._runs.get(key)

    def _create(self, key: tuple[int, int | None], *, name: str, tags: dict[str, str], start: int) -> _Sent:
        run = self.client.create_run(self._experiment, start_time=start, tags=tags, run_name=name)
        sent = _Sent(run.info.run_id, name, run.info.start_time, run.info.status, dict(tags))
        self._runs[key] = sent
        return sent

    # -- folds and trials

    def _send_fold(self, fold: Fold) -> None:
        key = (fold.number, None)
        described = fold_description(self.study, fold, study_id=self._id)
        sent = self._known(key)
        if sent is None:
            start = milliseconds(self.study.path / "study.json")
            sent = self._create(key, name=described.name, tags=described.tags, start=start)
        if not sent.described:
            self._log(sent, tags=described.tags, params=described.params)
            self._log_data(sent, fold)
            for (number, trial), child in self._runs.items():
                if number == fold.number and trial is not None:
                    self._log(child, tags={"mlflow.parentRunId": sent.id})
            sent.described = True
        running = False
        ended = self._ended[fold.number]
        for number in self._begun(fold):
            if number in ended:
                continue
            try:
                record = self.study.trial(fold.number, number)
                described = trial_description(record, self.study.specification, study_id=self._id)
                figures = trial_figures(record)
            except FileNotFoundError:
                continue  # its folder is there, and its first file not yet
            except Exception as error:  # noqa: BLE001 - whatever is wrong with one record stops no other
                folder = self.study.trial_dir(fold.number, number)
                self._problems.append(f"the trial {folder} can't be read: {_reason(error)}")
                continue
            self._send_trial(record, described, figures, parent=sent)
            running = running or record.state not in STATUS
        self._send_best(sent, in_order(ended.values()))
        self._send_fold_status(sent, running=running, ended=ended)

    def _begun(self, fold: Fold) -> list[int]:
        folder = self.study.fold_dir(fold.number) / "trials"
        if not folder.is_dir():
            return []
        return sorted(int(entry.name) for entry in os.scandir(folder) if entry.name.isdigit())

    def _send_trial(self, record: TrialRecord, described: Description, figures: Figures, *, parent: _Sent) -> None:
        sent = self._known((record.fold, record.number))
        if record.number in self._ended[record.fold]:
            return  # another process has sent it to its end
        tags = described.tags | {"mlflow.parentRunId": parent.id}
        if sent is None:
            begun = milliseconds(record.folder / "trial.json")
            as_begun = tags | {"dgsearch.state": "running"}
            as_begun.pop("dgsearch.stop_reason", None)
            as_begun.pop("dgsearch.failure", None)
            sent = self._create((record.fold, record.number), name=described.name, tags=as_begun, start=begun)
        is_over = record.state in STATUS
        steps = figures.curves.keys() - sent.steps
        points = [point for step in sorted(steps) for point in figures.curves[step]]
        points += figures.final if is_over else []
        self._log(
            sent,
            points=[(name, value, sent.start + at, step) for name, value, at, step in points],
            tags=tags,
            params=described.params,
        )
        sent.steps |= steps
        if is_over:
            end = max(milliseconds(record.folder / "result.json"), sent.start + round(figures.seconds * 1000))
            self.client.set_terminated(sent.id, STATUS[record.state], end)
            self._ended[record.fold][record.number] = Ended(
                record.number, described.name, record.state, figures.accuracy, figures.seconds, end
            )

    def _send_best(self, sent: _Sent, ended: Sequence[Ended]) -> None:
        points = best_points(ended, after=max(sent.steps, default=0))
        self._log(sent, points=points)
        sent.steps |= {step for name, _, _, step in points if name == "best/val_accuracy"}

    def _send_fold_status(self, sent: _Sent, *, running: bool, ended: dict[int, Ended]) -> None:
        status = "RUNNING" if running or not ended else "FINISHED"
        if sent.status == status:
            return
        if status == "RUNNING":
            self.client.update_run(sent.id, status=status)
        else:
            self.client.set_terminated(sent.id, status, max(e.end for e in ended.values()))
        sent.status = status

    def _log(
        self,
        sent: _Sent,
        *,
        points: Sequence[Point] = (),
        tags: dict[str, str] | None = None,
        params: dict[str, str] | None = None,
    ) -> None:
        """Send points, and the tags and parameters that differ from what is there, in as few requests as can be."""
        from mlflow.entities import Metric, Param, RunTag

        new_tags = {k: v for k, v in (tags or {}).items() if sent.tags.get(k) != v}
        # MLflow refuses another value for a parameter that is there.
        new_params = {k: v for k, v in (params or {}).items() if k not in sent.params}
        first = True
        for begin in range(0, max(len(points), 1), BATCH):
            metrics = [Metric(*point) for point in points[begin : begin + BATCH]]
            if not metrics and not new_tags and not new_params:
                return
            self.client.log_batch(
                sent.id,
                metrics=metrics,
                params=[Param(k, v) for k, v in new_params.items()] if first else [],
                tags=[RunTag(k, v) for k, v in new_tags.items()] if first else [],
            )
            first = False
        sent.tags |= new_tags
        sent.params |= new_params.keys()

    def _log_data(self, sent: _Sent, fold: Fold) -> None:
        """Log the fold's source domains as inputs, each with its fingerprint; MLflow keeps one of each."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        s = self.study.specification
        inputs = [
            DatasetInput(
                Dataset(
                    name=domain,
                    digest=s.fingerprints[domain][:36],
                    source_type="local",
                    source=json.dumps({"uri": str(Path(s.data) / domain)}),
                ),
                [InputTag("mlflow.data.context", "source domain")],
            )
            for domain in fold.sources
            if domain in s.fingerprints
        ]
        if inputs:
            self.client.log_inputs(sent.id, datasets=inputs)

    def _send_note(self) -> None:
        text = note(self.study, [list(self._ended[fold.number].values()) for fold in self.study.folds])
        if text != self._note:
            self.client.set_experiment_tag(self._experiment, NOTE, text)
            self._note = text

    # -- selection and evaluation

    def _chosen(self, kind: str) -> list[tuple[Fold, dict[str, Any]]]:
        """Return what ``selection.json`` or ``evaluation.json`` says of each fold; nothing where there is none."""
        file = self.study.path / f"{kind}.json"
        if not file.exists():
            return []
        folds = {(fold.held_out, fold.sources): fold for fold in self.study.folds}
        try:
            entries = read_json(file)["folds"]
            return [(folds[tuple(e["held_out"]), tuple(e["sources"])], e) for e in entries]
        except KeyError as error:
            raise ValueError(f"{file} is not of this study: {error}") from None

    def _send_selection(self) -> None:
        file = self.study.path / "selection.json"
        try:
            chosen = self._chosen("selection")
            marked = {(fold.number, int(entry["trial"])): entry["recipe"] for fold, entry in chosen}
        except (ValueError, KeyError, TypeError) as error:
            self._problems.append(f"{file} can't be read: {_reason(error)}")
            return
        for key, sent in self._runs.items():
            if "dgsearch.selected" in sent.tags and key not in marked:
                self.client.delete_tag(sent.id, "dgsearch.selected")
                del sent.tags["dgsearch.selected"]
        for (fold, trial), recipe in marked.items():
            parent, child = self._runs[fold, None], self._runs.get((fold, trial))
            if child is None:
                self._problems.append(f"{file} selects trial {trial} of fold {fold}, which is not in the study")
                continue
            digest = _digest(file)
            if parent.tags.get("dgsearch.selection") == digest and "dgsearch.selected" in child.tags:
                continue
            self.client.log_dict(child.id, recipe, "recipe.json")
            self._log(child, tags={"dgsearch.selected": "true"})
            self.client.log_artifact(parent.id, str(file))
            self._log(parent, tags={"dgsearch.selection": digest})  # last: what has it is whole

    def _send_evaluation(self) -> None:
        file = self.study.path / "evaluation.json"
        try:
            chosen = self._chosen("evaluation")
        except (ValueError, KeyError, TypeError) as error:
            self._problems.append(f"{file} can't be read: {_reason(error)}")
            return
        for fold, entry in chosen:
            parent, digest = self._runs[fold.number, None], _digest(file)
            if parent.tags.get("dgsearch.evaluation") == digest:
                continue
            figures = {name: entry.get(f"target_{name}") for name in ("accuracy", "macro_f1")}
            at = milliseconds(file)
            self._log(parent, points=[(f"target/{n}", float(v), at, 0) for n, v in figures.items() if v is not None])
            self.client.log_artifact(parent.id, str(file), "target")
            self._log(parent, tags={"dgsearch.evaluation": digest})


def _digest(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()


def _reason(error: Exception) -> str:
    """Return what an error says in one line."""
    text = str(error).strip() or type(error).__name__
    for sign, short in (
        ("Connection refused", "connection refused"),
        ("timed out", "no answer in time"),
        ("Name or service not known", "unknown host"),
        ("Failed to resolve", "unknown host"),
    ):
        if sign in text and "HTTPConnectionPool" in text.replace("HTTPSC", "HTTPC"):
            return short
    line = text.splitlines()[0]
    named = isinstance(error, ValueError | OSError) or type(error).__name__.endswith("MlflowException")
    return (line if named else f"{type(error).__name__}: {line}")[:300]
