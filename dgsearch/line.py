"""The straight line as functions: search, status, select, evaluate, train; what the commands call."""

import importlib.metadata
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dgsearch import selection
from dgsearch.component import known_or_raise
from dgsearch.domains.batches import Sources
from dgsearch.domains.cache import CACHES, default_cache_dir, readable
from dgsearch.domains.layout import DomainIndex, class_names, domain_names, read_domain
from dgsearch.domains.split import split
from dgsearch.evaluation import Report, evaluate
from dgsearch.lease import SILENCE
from dgsearch.networks import PRECISIONS, network_name, weights_hash
from dgsearch.recipe import decode
from dgsearch.report.board import as_data
from dgsearch.report.plan import Plan
from dgsearch.report.snapshot import Course, Reader, Seen
from dgsearch.search.budget import Budget, Spent, spent
from dgsearch.search.engine import FLOOR, Engine, baseline, default_recipes, ended_by_signals
from dgsearch.search.local import run_local
from dgsearch.search.retention import KEEP
from dgsearch.search.trial import Training
from dgsearch.search.warm import warm
from dgsearch.search_space import read_space
from dgsearch.selection import Selection
from dgsearch.study import Fold, Specification, Study, TrialRecord, read_json
from dgsearch.train import Cost, Evaluation, TrialResult, measure, run_trial

Event = Callable[[str, TrialRecord], None]
Progress = Callable[[str, int, int], None]
LeftOut = Callable[[str, int], None]


@dataclass(frozen=True)
class Executor:
    """Where trials run: ``ray`` (a cluster) or ``local`` (this process, one after another)."""

    kind: str = "ray"
    address: str = "local"
    max_concurrent: int | None = None
    cpus_per_trial: float = 1
    gpus_per_trial: float = 0

    def __post_init__(self) -> None:
        known_or_raise("executor", self.kind, ("ray", "local"))

    @property
    def device(self) -> str:
        """The device that trials compute on."""
        on_gpu = self.gpus_per_trial > 0 if self.kind == "ray" else torch.cuda.is_available()
        return "cuda" if on_gpu else "cpu"

    @property
    def devices(self) -> float:
        """The devices that a trial reserves: a share of a GPU is a share, the worker of a trial on CPUs is one."""
        return self.gpus_per_trial if self.kind == "ray" and self.gpus_per_trial else 1.0

    @property
    def at_once(self) -> int:
        """How many trials run at once. A cluster is asked for its nodes."""
        if self.kind == "local":
            return 1
        if self.max_concurrent is not None:
            return self.max_concurrent
        from dgsearch.search.ray_tune import cluster_room  # Ray takes seconds to import

        return max(1, cluster_room(self.address, cpus=self.cpus_per_trial, gpus=self.gpus_per_trial))


def plan_folds(
    data: Path, *, targets: str = "all", sources: str | None = None, deploy: bool = False
) -> tuple[Fold, ...]:
    """Return the folds: one for each target named, which is held out and never opened.

    ``targets`` is ``all`` or names with commas; ``sources`` names the source domains, else they are all
    others. With ``sources`` given, a target need not exist. ``deploy`` adds the fold of the model to ship: it
    holds nothing out, and has every domain of the other folds as a source, targets that exist among them.

    Raises:
        ValueError: for an unknown domain, or a fold without a source.
    """
    known = domain_names(data)
    named = None if sources is None else known if sources == "all" else _names(sources)
    for name in named or []:
        known_or_raise("source domain", name, known, where=str(data))
    held_out = known if targets == "all" else _names(targets)
    if named is not None and targets == "all":
        held_out = [name for name in known if name not in named] or [""]
    for name in held_out if targets != "all" else ():
        if name in (named or ()):
            raise ValueError(f"{name!r} is both a source and a target: name it in one of --sources and --targets")
    folds: list[Fold] = []
    for target in held_out:
        if named is None:
            known_or_raise("target domain", target, known, where=str(data))
        rest = [name for name in (named if named is not None else known) if name != target]
        if not rest:
            raise ValueError(f"no source domain is left when {target!r} is held out of {data}")
        folds.append(Fold(len(folds), tuple(rest), (target,) if target else ()))
    if deploy and all(fold.held_out for fold in folds):
        used = {name for fold in folds for name in (*fold.sources, *fold.held_out)}
        folds.append(Fold(len(folds), tuple(name for name in known if name in used), ()))
    return tuple(folds)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise ValueError(f"expected different domain names with commas between, not {text!r}")
    return names


def open_study(
    path: Path,
    *,
    data: Path,
    space: str,
    targets: str = "all",
    sources: str | None = None,
    deploy: bool = False,
    network: str = "small_cnn",
    resolution: int = 32,
    batch_size: int | None = None,
    steps: int = 300,
    seed: int = 0,
    threads: int = 1,
    precision: str = "float32",
    cache_dir: Path | None = None,
    cache: str = "disk",
    skip_broken: bool = False,
    progress: Progress = lambda name, done, total: None,
    left_out: LeftOut = lambda name, count: None,
) -> Study:
    """Create a study, or open the one that the same arguments created.

    Source domains are indexed and decoded, or at least each file of theirs read once, before anything is
    written: ``progress(domain, done, total)``. ``cache`` is disk, memory or none. With ``skip_broken``, files
    that can't be read are not in the study: ``left_out(domain, count)``.

    Raises:
        ValueError: if an argument or a file is wrong, or ``path`` holds another study.
    """
    if min(steps, resolution, threads) < 1 or (batch_size is not None and batch_size < 1):
        raise ValueError("steps, resolution, batch size and threads must be at least 1")
    known_or_raise("precision", precision, PRECISIONS)
    network = network_name(network)
    read = read_space(space, network=network, batch_size=batch_size)
    folds = plan_folds(data, targets=targets, sources=sources, deploy=deploy)
    for fold in folds:
        for family in read.families:
            chosen = {slot: names[0] for slot, names in family.choices.items()}
            for cls in family.components(chosen).values():
                if len(fold.sources) < cls.min_domains:
                    raise ValueError(
                        f"family {family.name!r} needs at least {cls.min_domains} source domains ({cls.choice()}), "
                        f"and the fold that holds out {', '.join(fold.held_out) or 'none'} has {len(fold.sources)}"
                    )
    names = sorted({name for fold in folds for name in fold.sources})
    known_or_raise("cache", cache, CACHES)
    indexes = [read_domain(data, name) for name in names]
    for fold in folds:
        classes = class_names([index for index in indexes if index.name in fold.sources])
        if len(classes) < 2:
            raise ValueError(f"{data} has only the class {classes[0]!r} in {', '.join(fold.sources)}: nothing to learn")
    specification = Specification(
        data=str(data.resolve()),
        fingerprints={index.name: index.fingerprint for index in indexes},
        space=read.name,
        space_hash=read.hash,
        network=network,
        resolution=resolution,
        steps=steps,
        batch_size=batch_size,
        seed=seed,
        threads=threads,
        precision=precision,
        folds=folds,
        version=importlib.metadata.version("dgsearch"),
        weights_hash=weights_hash(network),  # fetches them: trials find the file
    )
    if Study.has_begun(path):  # of another search, perhaps: said before long decoding
        there = Study.open(path).specification.fingerprints
        Study.create(path, replace(specification, fingerprints=there), [])
    kept = [
        _readable(index, resolution, cache_dir, cache, skip_broken, progress=progress, left_out=left_out)
        for index in indexes
    ]
    for index in kept:
        parts = split(index, seed=seed)
        if not len(parts.validation) or not len(parts.train):
            raise ValueError(
                f"domain {index.name!r} of {data} can't be both trained on and validated on: some class needs at "
                f"least 2 images, or 2 groups"
            )
    fingerprints = {index.name: index.fingerprint for index in kept}
    return Study.create(path, replace(specification, fingerprints=fingerprints), kept)


def _readable(
    index: DomainIndex,
    resolution: int,
    cache_dir: Path | None,
    cache: str,
    skip_broken: bool,
    *,
    progress: Progress,
    left_out: LeftOut,
) -> DomainIndex:
    kept = readable(
        index,
        resolution=resolution,
        cache_dir=cache_dir or default_cache_dir(),
        cache=cache,
        skip_broken=skip_broken,
        progress=lambda done, total: progress(index.name, done, total),
    )
    if len(kept) < len(index):
        left_out(index.name, len(index) - len(kept))
    return kept


def search(
    study: Study,
    *,
    space: str,
    trials: int | None = None,
    hours: float | None = None,
    device_hours: float | None = None,
    floor: int = FLOOR,
    sampler: str = "tpe",
    warm_start: Path | None = None,
    keep: str = "best",
    executor: Executor = Executor(),  # noqa: B008 - frozen
    cache_dir: Path | None = None,
    cache: str = "disk",
    on_event: Event = lambda kind, record: None,
    note: Callable[[str], None] = lambda text: None,
) -> str:
    """Run a study's search until a budget is used up, and return which; go on where an earlier session left off.

    A search also ends, by ``families``, when each fold has given up all of them.

    Budgets are ``trials`` a fold (8 where no budget is given), ``hours`` of searching and ``device_hours``, over all
    sessions of the study. Trials that run when hours or device-hours are used up go on to their end. ``keep`` is
    ``best``, the weights of the top 5 trials a fold and of the best a family, or ``all``.

    Until each family has ``floor`` trials, one in three is given to the one that has the fewest; of the others the
    ``sampler`` (tpe or random) chooses freely. Like ``trials``, both may be others in a later session, and hold for the
    trials begun in it. ``warm_start`` is an older study whose best recipes each fold that may know them tries after its
    defaults. ``cache``: where trials have decoded images, disk, memory or none; results do not depend on it. What
    ``open_study`` has not decoded on a node, its first trial there does. ``note(text)`` is called with what a person
    should know, such as which of a cluster's nodes get no trials, and why.

    Raises:
        ValueError: for a bad argument, a study that another process searches, or a trial that could not write.
        OSError: if the study can't be written; nothing that ended is lost, and the search can be gone on with.
    """
    known_or_raise("cache", cache, CACHES)
    specification = study.specification
    read = read_space(space, network=specification.network, batch_size=specification.batch_size)

    def waiting(who: str) -> None:
        note(f"{who} drove this study: waiting up to {SILENCE:.0f} s for a sign of life")

    budget = Budget(trials, hours, device_hours)
    with ended_by_signals(), study.driven(waiting=waiting):
        engine = Engine(
            study,
            read,
            **vars(budget),
            floor=floor,
            sampler=sampler,
            devices=executor.devices,
            keep=keep,
            on_event=on_event,
        )
        study.plan(
            vars(budget)
            | {"floor": floor, "sampler": sampler, "keep": keep}
            | {"baseline": baseline(read), "families": read.family_names}
        )
        if (begun := warm(engine, warm_start)) is not None:
            note(begun)
        try:
            if engine.left:
                _run(engine, executor, cache_dir, cache, note)
        finally:
            engine.close()
    assert engine.ended_by is not None
    return engine.ended_by


def _run(engine: Engine, executor: Executor, cache_dir: Path | None, cache: str, note: Callable[[str], None]) -> None:
    specification = engine.study.specification
    trial = Training(
        network=specification.network,
        steps=specification.steps,
        resolution=specification.resolution,
        seed=specification.seed,
        device=executor.device,
        threads=specification.threads,
        precision=specification.precision,
        cache_dir=cache_dir,
        cache=cache,
    )
    if executor.kind == "local":
        run_local(engine, trial)
        return
    from dgsearch.search.ray_tune import run_ray  # Ray takes seconds to import

    run_ray(
        engine,
        trial,
        address=executor.address,
        max_concurrent=executor.max_concurrent,
        cpus_per_trial=executor.cpus_per_trial,
        gpus_per_trial=executor.gpus_per_trial,
        look=trial.look,
        say=note,
    )


def foresee_search(
    study: Study,
    *,
    space: str,
    trials: int | None = None,
    hours: float | None = None,
    device_hours: float | None = None,
    floor: int = FLOOR,
    keep: str = "best",
    executor: Executor = Executor(),  # noqa: B008 - frozen
    cache_dir: Path | None = None,
    cache: str = "disk",
    earlier: Path | None = None,
    progress: Callable[[str], None] = lambda family: None,
) -> Plan:
    """Return what a search of ``study`` would cost, without searching.

    Each family's default is trained for a few steps on the first fold's sources, in this process. With a study at
    ``earlier`` in which trials have begun, it is what is left of that one.

    Raises:
        ValueError: if an argument is wrong, or ``earlier`` is of another search.
    """
    known_or_raise("choice of weights to keep", keep, KEEP)
    budget = Budget(trials, hours, device_hours)
    specification = study.specification
    read = read_space(space, network=specification.network, batch_size=specification.batch_size)
    begun: tuple[Seen, ...] = ()
    used = Spent()
    queues: tuple[tuple[str, ...], ...] = ()
    if earlier is not None and Study.has_begun(earlier):
        there = Study.create(earlier, specification, [])  # only opened, or refused
        begun, used, queues = Reader(there).read().trials, spent(there), Course.of(there).queues
    recipes = default_recipes(read)
    place = cache_dir or default_cache_dir()
    indexes = [DomainIndex.load(study.index_path(name)) for name in specification.fingerprints]
    sources = Sources(
        tuple(index for index in indexes if index.name in study.folds[0].sources),
        specification.resolution,
        place,
        cache,
    )
    costs: dict[str, Cost] = {}
    unmeasured: dict[str, str] = {}
    for family, recipe in recipes.items():
        progress(family)
        try:
            costs[family] = measure(
                recipe,
                sources,
                network=specification.network,
                steps=specification.steps,
                seed=specification.seed,
                device=executor.device,
                threads=specification.threads,
                precision=specification.precision,
            )
        except RuntimeError as error:  # no such device, no memory for it, or diverged
            unmeasured[family] = str(error).splitlines()[0]
    names = tuple(read.family_names)
    course = Course(len(study.folds), specification.steps, budget, tuple(recipes), names, floor, queues)
    images = sum(map(len, indexes)) * specification.resolution**2 * 3 if cache == "disk" else 0
    return Plan.of(
        course,
        begun,
        used,
        costs,
        unmeasured,
        at_once=executor.at_once,
        devices=executor.devices,
        keep=keep,
        image_bytes=images,
    )


def status(study: Study) -> dict[str, Any]:
    """Return how far a search is: counts and best source accuracy by fold and family, failures, budget, time left."""
    return as_data(Reader(study).read())


def all_failed(study: Study) -> str | None:
    """Return why the first trial of a fold failed if every trial of that fold did, else None."""
    for fold in study.folds:
        trials = study.trials(fold.number)
        if trials and all(t.state == "failed" for t in trials):
            return str(trials[0].result["reason"])
    return None


def unfinished(study: Study) -> str | None:
    """Return how much of the latest search is still to do, or None if it is done.

    Trials that run when hours or device-hours are used up are still to end; interrupted ones then need a larger budget.
    """
    snapshot = Reader(study).read()
    ended = sum(t.state != "running" for t in snapshot.trials)
    if snapshot.ended_by is not None and (snapshot.driver is None or ended == len(snapshot.trials)):
        return None
    return f"{ended} {'' if snapshot.asked is None else f'of {snapshot.asked} '}trials have ended"


def select(study: Study, *, criterion: str = "training-domain") -> Selection:
    """Select a trial for each fold by source validation."""
    return selection.select(study, criterion=criterion)


def evaluate_study(
    study: Study,
    *,
    cache_dir: Path | None = None,
    skip_broken: bool = False,
    progress: Callable[[str], None] = lambda name: None,
    left_out: LeftOut = lambda name, count: None,
) -> Report:
    """Evaluate a study's selection on the domains held out; a report there is already is given again."""
    chosen = Selection.load(study)
    report = Report.load(study)
    if report is not None and report.read == chosen.read:
        return report
    return evaluate(
        study,
        chosen,
        cache_dir=cache_dir or default_cache_dir(),
        skip_broken=skip_broken,
        progress=progress,
        left_out=left_out,
    )


def train_again(
    trial_file: Path,
    *,
    data: Path,
    report: Callable[[Evaluation], None] = lambda evaluation: None,
    settings: Mapping[str, Any] | None = None,
    cache_dir: Path | None = None,
    skip_broken: bool = False,
    progress: Progress = lambda name, done, total: None,
    left_out: LeftOut = lambda name, count: None,
) -> tuple[TrialResult, str]:
    """Train one trial again, alone, from its ``trial.json``; return the result and what differs here.

    The file may also be a bare recipe: then ``settings`` (steps, network, seed, resolution, threads, precision,
    and ``targets``, the domains left out) say how, and what they leave out is as a search has it.

    Raises:
        ValueError: if the file is neither, or is a trial and settings are given too.
    """
    if not trial_file.is_file():
        raise ValueError(f"no file {trial_file}: expected the trial.json of a trial, or a recipe")
    values = _trial_values(read_json(trial_file), data, dict(settings or {}), where=str(trial_file))
    indexes = tuple(
        _readable(
            read_domain(data, name),
            values["resolution"],
            cache_dir,
            "disk",
            skip_broken,
            progress=progress,
            left_out=left_out,
        )
        for name in values["sources"]
    )
    versions = {
        name: (version, importlib.metadata.version(name)) for name, version in values.get("versions", {}).items()
    }
    differs = ", ".join(f"{name} {then} → {now}" for name, (then, now) in versions.items() if then != now)
    result = run_trial(
        decode(values["recipe"], where=str(trial_file)),
        Sources(indexes, values["resolution"], cache_dir or default_cache_dir()),
        network=values["network"],
        steps=values["steps"],
        seed=values["seed"],
        threads=values["threads"],
        precision=values["precision"],
        device="cuda" if torch.cuda.is_available() else "cpu",
        report=report,
    )
    return result, differs


SETTINGS: dict[str, Any] = {
    "network": "small_cnn",
    "steps": 300,
    "resolution": 32,
    "seed": 0,
    "threads": 1,
    "precision": "float32",
}


def _trial_values(values: Any, data: Path, settings: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Return a trial's values, or those that a bare recipe and settings make, checked."""
    if not isinstance(values, dict):
        raise ValueError(f"{where} is neither a trial nor a recipe: it holds no table")
    if "recipe" not in values:
        targets = settings.pop("targets", None)
        known = domain_names(data)
        held_out = [] if targets is None else _names(targets)
        for name in held_out:
            known_or_raise("target domain", name, known, where=str(data))
        sources = [name for name in known if name not in held_out]
        return {"recipe": values, "sources": sources, **SETTINGS, **settings}
    if settings:
        raise ValueError(f"{where} is a trial, which says itself how it was trained: leave out {', '.join(settings)}")
    kinds: dict[str, type] = {"sources": list, **{n: type(v) for n, v in SETTINGS.items()}}
    if isinstance(values.get("resolution"), int) and values["resolution"] < 8:
        raise ValueError(f"{where}: resolution must be at least 8, not {values['resolution']}")
    for name, kind in kinds.items():
        if not isinstance(values.get(name), kind):
            raise ValueError(
                f"{where} is not a trial: {name} must be of type {kind.__name__}, not {values.get(name)!r}"
            )
    return values


def as_json(value: Any) -> str:
    """Return plain data as JSON text."""
    return json.dumps(value, indent=2, ensure_ascii=False)
