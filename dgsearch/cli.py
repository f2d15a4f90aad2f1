"""The commands: options in, functions of the line called, results printed. No logic."""

import contextlib
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

app = typer.Typer(
    name="dgsearch",
    help="Search for the training method and hyperparameters that make an image classifier work in a domain "
    "nobody has seen.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Build and check data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")


class _Screen(Console):
    """A console that falls silent when nobody reads it any more: that must not end a search."""

    def on_broken_pipe(self) -> None:
        """Write to nowhere from now on."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


screen = _Screen(stderr=True, highlight=False)

StudyPath = Annotated[Path, typer.Argument(metavar="STUDY", help="A study directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Data = Annotated[
    Path, typer.Option(help="The data set: a folder DATA/<domain>/<class>/<image>, or a manifest (.csv, .parquet).")
]
SkipBroken = Annotated[bool, typer.Option("--skip-broken", help="Leave out images that can't be read.")]
TrackingUri = Annotated[
    Optional[str],  # noqa: UP045 - typer reads it
    typer.Option(help="MLflow store; else $MLFLOW_TRACKING_URI, else a SQLite file in the study."),
]


def _out(text: str) -> None:
    sys.stdout.write(text if text.endswith("\n") else f"{text}\n")


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)


def _decoding(bar: Progress) -> Callable[[str, int, int], None]:
    """Return a callback that shows a domain's decoding while it lasts."""
    tasks: dict[str, Any] = {}

    def show(name: str, done: int, total: int) -> None:
        if name not in tasks:
            tasks[name] = bar.add_task(escape(f"decoding {name}"))
        bar.update(tasks[name], completed=done, total=total)
        if done == total:
            bar.remove_task(tasks.pop(name))

    return show


def _left_out(name: str, count: int) -> None:
    screen.print(f"{name}: {count} images that can't be read are left out", markup=False, soft_wrap=True)


def _say(text: str) -> None:
    screen.print(text, markup=False, soft_wrap=True)


@data_app.command("check")
def data_check(
    data: Annotated[Path, typer.Argument(metavar="DIR|MANIFEST", help="The data set.")],
    as_json: AsJson = False,
) -> None:
    """Read every file and say what would spoil a result (exit 1). Example: dgsearch data check data/digits."""
    from dgsearch.domains.check import check_data
    from dgsearch.report.checked import render_check

    with _bar() as bar:
        task = bar.add_task("checking")
        found = check_data(data, progress=lambda done, total: bar.update(task, completed=done, total=total))
    _out(json.dumps(found, indent=2, ensure_ascii=False) if as_json else render_check(found))
    if not found["ok"]:
        raise typer.Exit(1)


@data_app.command("build")
def data_build(
    name: Annotated[str, typer.Argument(help="Which set: digits.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    seed: Annotated[int, typer.Option(help="Of every random draw in it.")] = 0,
) -> None:
    """Build a data set that needs no download. Example: dgsearch data build digits --out data/digits."""
    from dgsearch.component import known_or_raise
    from dgsearch.domains.digits import build_digits

    known_or_raise("built-in data set", name, ["digits"])
    with _bar() as bar:
        task = bar.add_task(f"building {name}")
        build_digits(out, seed=seed, progress=lambda done, total: bar.update(task, completed=done, total=total))
    _out(f"{name}: {out}")


@app.command()
def methods(
    name: Annotated[Optional[str], typer.Argument(help="One choice, or a slot.")] = None,  # noqa: UP045
    as_json: AsJson = False,
) -> None:
    """List what can be searched: slots, choices, ranges and defaults. Example: dgsearch methods coral."""
    from dgsearch.line import as_json as to_json
    from dgsearch.report.catalogue import catalogue, render_catalogue

    found = catalogue(name)
    _out(to_json(found) if as_json else render_catalogue(found))


@app.command()
def search(
    data: Data,
    study: Annotated[Path, typer.Option(help="The study directory: made, or gone on with.")],
    space: Annotated[str, typer.Option(help="A shipped search space, or a TOML file.")] = "quick",
    targets: Annotated[str, typer.Option(help="Domains held out, a fold each: all, or NAME,NAME.")] = "all",
    sources: Annotated[Optional[str], typer.Option(help="Source domains NAME,NAME; else all others.")] = None,  # noqa: UP045
    deploy: Annotated[bool, typer.Option("--deploy", help="Add the fold that holds nothing out.")] = False,
    trials: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Trials a fold; 8, or no end where hours or device-hours are given."),
    ] = None,
    hours: Annotated[Optional[float], typer.Option(help="Hours of searching, over all sessions.")] = None,  # noqa: UP045
    device_hours: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Hours of training times the devices reserved, over all trials."),
    ] = None,
    floor: Annotated[int, typer.Option(min=0, help="Trials every family has, given in turn with free ones.")] = 3,
    sampler: Annotated[str, typer.Option(help="tpe, or random: the baseline.")] = "tpe",
    warm_start: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="STUDY", help="An older study, whose best recipes are tried after the defaults."),
    ] = None,
    keep: Annotated[str, typer.Option(help="Weights kept: of the best trials a fold and family, or all.")] = "best",
    plan: Annotated[
        bool, typer.Option("--plan", help="Measure a few steps and say what the search would take; search nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan, or the status at the end, as JSON.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps a trial.")] = 300,
    network: Annotated[str, typer.Option(help="small_cnn, mnist_cnn, resnet18 or resnet50.")] = "small_cnn",
    weights: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="FILE|none", help="Pretrained weights of a resnet; else ImageNet's. none: random."),
    ] = None,
    resolution: Annotated[int, typer.Option(min=8, help="Pixels a side.")] = 32,
    batch_size: Annotated[Optional[int], typer.Option(min=1, help="Examples a domain; fixes it.")] = None,  # noqa: UP045
    seed: Annotated[int, typer.Option(help="Of splits, initial weights, order and sampler.")] = 0,
    executor: Annotated[str, typer.Option(help="ray, or local: in this process, one by one.")] = "ray",
    address: Annotated[str, typer.Option(help="Ray cluster: local, auto or HOST:PORT.")] = "local",
    max_concurrent: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Trials at once; else as many as fit."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads a trial computes with.")] = 1,
    cpus_per_trial: Annotated[float, typer.Option(min=0, help="CPUs a trial reserves.")] = 1,
    gpus_per_trial: Annotated[float, typer.Option(min=0, help="GPUs a trial reserves; may be a fraction.")] = 0,
    precision: Annotated[str, typer.Option(help="float32 or bfloat16 (autocast).")] = "float32",
    cache: Annotated[str, typer.Option(help="Where trials have decoded images: disk, memory or none.")] = "disk",
    skip_broken: SkipBroken = False,
    tracking_uri: TrackingUri = None,
) -> None:
    """Search a space on every fold. The same command again goes on after an interruption.

    Budgets are --trials, --hours and --device-hours, over all sessions of a study: the first used up ends a search.

    Example: dgsearch search --data data/digits --space quick --study runs/digits
    """
    from dgsearch import line
    from dgsearch.component import known_or_raise
    from dgsearch.networks import network_name
    from dgsearch.report.board import ENDED_BY, render_board
    from dgsearch.report.progress import watching
    from dgsearch.report.snapshot import Reader
    from dgsearch.search.budget import Budget
    from dgsearch.search.retention import KEEP
    from dgsearch.tracking.store import remember_uri
    from dgsearch.tracking.writer import Writer

    Budget(trials, hours, device_hours)  # a wrong one is refused before anything is read
    known_or_raise("choice of weights to keep", keep, KEEP)
    where = line.Executor(executor, address, max_concurrent, cpus_per_trial, gpus_per_trial)
    try:
        with _bar() as bar, tempfile.TemporaryDirectory(prefix="dgsearch-") as scratch:
            opened = line.open_study(
                Path(scratch) / "study" if plan else study,
                data=data,
                space=space,
                targets=targets,
                sources=sources,
                deploy=deploy,
                network=network_name(network, weights=weights),
                resolution=resolution,
                batch_size=batch_size,
                steps=steps,
                seed=seed,
                threads=threads,
                precision=precision,
                cache=cache,
                skip_broken=skip_broken,
                progress=_decoding(bar),
                left_out=_left_out,
            )
            if plan:
                task = bar.add_task("measuring", total=None)
                found = line.foresee_search(
                    opened,
                    space=space,
                    trials=trials,
                    hours=hours,
                    device_hours=device_hours,
                    floor=floor,
                    keep=keep,
                    executor=where,
                    cache=cache,
                    earlier=study,
                    progress=lambda family: bar.update(task, description=escape(f"measuring {family}")),
                )
    except KeyboardInterrupt:
        screen.print("interrupted: nothing is lost. The same command goes on.")
        raise typer.Exit(130) from None
    if plan:
        _out(line.as_json(found.as_data()) if as_json else found.render())
        return
    if tracking_uri is not None:
        remember_uri(opened, tracking_uri)
    # A stream of its own: while a trial runs in this process, what is printed goes to that trial's log.
    console = _Screen(file=sys.stderr, highlight=False) if screen.is_terminal else screen
    began = time.perf_counter()
    try:
        with Writer(opened, uri=tracking_uri) as writer, watching(opened, console=console) as watch:

            def event(kind: str, record: Any) -> None:
                watch(kind, record)
                writer.poke()

            ended_by = line.search(
                opened,
                space=space,
                trials=trials,
                hours=hours,
                device_hours=device_hours,
                floor=floor,
                sampler=sampler,
                warm_start=warm_start,
                keep=keep,
                executor=where,
                cache=cache,
                on_event=event,
                note=_say,
            )
    except KeyboardInterrupt:
        screen.print("interrupted: nothing that ended is lost. The same command goes on.")
        raise typer.Exit(130) from None
    seconds = time.perf_counter() - began
    screen.print(render_board(Reader(opened).read(), width=screen.width), markup=False, end="")
    option = ENDED_BY[ended_by]
    if as_json:
        _out(line.as_json(line.status(opened)))
    used_up = f"{option} is used up: the same command with a larger {option} goes on"
    screen.print(f"searched for {seconds:.0f} s; {option if ended_by == 'families' else used_up}", soft_wrap=True)
    if (reason := line.all_failed(opened)) is not None:
        screen.print(f"error: every trial of a fold failed, the first with: {reason}", markup=False, soft_wrap=True)
        raise typer.Exit(1)
    if (study / "selection.json").exists():
        screen.print("a selection was made before and stands; to select anew, move selection.json and evaluation.json")
    else:
        screen.print(f"next: dgsearch select {shlex.quote(str(study))}", markup=False, soft_wrap=True)


@app.command()
def status(
    study: StudyPath,
    follow: Annotated[bool, typer.Option("--follow", help="Show it until it is done; Ctrl-C leaves.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say how far a search is, here or on another machine that sees the study. Example: dgsearch status runs/digits."""
    from dgsearch import line
    from dgsearch.report import progress
    from dgsearch.report.board import as_data, render_board
    from dgsearch.report.snapshot import Reader
    from dgsearch.study import Study

    opened = Study.open(study)
    if follow:
        with contextlib.suppress(KeyboardInterrupt):
            if as_json:
                for snapshot in progress.changes(opened):
                    _out(json.dumps(as_data(snapshot)))
            else:
                progress.follow(opened, console=Console(highlight=False))
        return
    _out(line.as_json(line.status(opened)) if as_json else render_board(Reader(opened).read()))


@app.command()
def select(
    study: StudyPath,
    criterion: Annotated[str, typer.Option(help="How: training-domain.")] = "training-domain",
    as_json: AsJson = False,
) -> None:
    """Select each fold's model by source validation. Example: dgsearch select runs/digits."""
    from dataclasses import asdict

    from dgsearch import line
    from dgsearch.report.tables import render, result_frame
    from dgsearch.study import Study
    from dgsearch.tracking.writer import project_quietly

    opened = Study.open(study)
    if (unfinished := line.unfinished(opened)) is not None:
        screen.print(f"note: the search is not finished: {unfinished}", soft_wrap=True)
    selection = line.select(opened, criterion=criterion)
    project_quietly(opened)
    if as_json:
        _out(line.as_json({k: v for k, v in asdict(selection).items() if k != "read"}))
    else:
        frame = result_frame(selection.folds).dropna(axis="columns", how="all")
        _out(render(frame, form="table", title=f"selected by {criterion}"))
        screen.print(f"next: dgsearch evaluate {shlex.quote(str(study))}", markup=False, soft_wrap=True)


@app.command()
def evaluate(study: StudyPath, skip_broken: SkipBroken = False, as_json: AsJson = False) -> None:
    """Open the held-out domains for the selected models. Example: dgsearch evaluate runs/digits."""
    from dataclasses import asdict

    from dgsearch import line
    from dgsearch.report.tables import render, result_frame
    from dgsearch.study import Study
    from dgsearch.tracking.writer import project_quietly

    opened = Study.open(study)
    report = line.evaluate_study(
        opened,
        skip_broken=skip_broken,
        progress=lambda name: screen.print(f"opening {name}", markup=False),
        left_out=_left_out,
    )
    for fold in report.folds:
        if fold.unknown_classes:
            names = ", ".join(fold.unknown_classes)
            screen.print(
                f"{', '.join(fold.held_out)}: no source has {names}: images of it count as wrong",
                markup=False,
                soft_wrap=True,
            )
    project_quietly(opened)
    if as_json:
        _out(line.as_json({k: v for k, v in asdict(report).items() if k != "read"}))
    else:
        _out(render(result_frame(report.folds), form="table", title=f"selected by {report.criterion}"))


@app.command()
def report(
    study: StudyPath,
    form: Annotated[str, typer.Option("--format", help="table, markdown or csv.")] = "table",
) -> None:
    """Print the result table. Example: dgsearch report runs/digits --format markdown."""
    from dgsearch.component import known_or_raise
    from dgsearch.evaluation import Report
    from dgsearch.report.tables import FORMATS, family_frame, render
    from dgsearch.selection import Selection, best_of_families
    from dgsearch.study import Study

    known_or_raise("format", form, FORMATS)
    opened = Study.open(study)
    selection = Selection.load(opened)
    folds = (Report.load(opened) or selection).folds
    frame = family_frame(folds, best_of_families(opened, selection))
    _out(render(frame, form=form, title=f"selected by {selection.criterion}"))


@app.command()
def track(study: StudyPath, tracking_uri: TrackingUri = None) -> None:
    """Write the whole study to MLflow again; twice changes nothing. Example: dgsearch track runs/digits."""
    from dgsearch.study import Study
    from dgsearch.tracking.projection import project
    from dgsearch.tracking.store import shown

    projected = project(Study.open(study), tracking_uri)
    for problem in projected.problems:
        screen.print(problem, markup=False)
    _out(f"{projected.trials} trials are at {shown(projected.uri)} as experiment {projected.experiment!r}")


@app.command()
def ui(
    study: StudyPath,
    port: Annotated[int, typer.Option(min=1, max=65535, help="On this machine only.")] = 5000,
    tracking_uri: TrackingUri = None,
) -> None:
    """Open the MLflow UI on the study's store. Example: dgsearch ui runs/digits."""
    from dgsearch.study import Study
    from dgsearch.tracking.ui import serve_ui

    serve_ui(Study.open(study), port=port, uri=tracking_uri)


@app.command()
def train(
    trial: Annotated[Path, typer.Argument(metavar="TRIAL.json", help="A trial.json of a study, or a bare recipe.")],
    data: Data,
    steps: Annotated[Optional[int], typer.Option(min=1, help="For a bare recipe: optimizer steps.")] = None,  # noqa: UP045
    network: Annotated[Optional[str], typer.Option(help="For a bare recipe: the network.")] = None,  # noqa: UP045
    seed: Annotated[Optional[int], typer.Option(help="For a bare recipe: the seed.")] = None,  # noqa: UP045
    targets: Annotated[Optional[str], typer.Option(help="For a bare recipe: domains left out.")] = None,  # noqa: UP045
    resolution: Annotated[Optional[int], typer.Option(min=8, help="For a bare recipe: pixels a side.")] = None,  # noqa: UP045
    save: Annotated[Optional[Path], typer.Option(metavar="FILE", help="Write the best weights: safetensors.")] = None,  # noqa: UP045
    skip_broken: SkipBroken = False,
    as_json: AsJson = False,
) -> None:
    """Train one trial again, alone, or a bare recipe such as {"objective": {"kind": "coral"}}.

    Example: dgsearch train runs/digits/folds/0/trials/0003/trial.json --data data/digits
    """
    from dataclasses import asdict

    from safetensors.torch import save_file

    from dgsearch import line
    from dgsearch.study import recorded_best

    given = {"steps": steps, "network": network, "seed": seed, "targets": targets, "resolution": resolution}
    with _bar() as bar:
        task = bar.add_task("training")
        result, differs = line.train_again(
            trial,
            data=data,
            settings={name: value for name, value in given.items() if value is not None},
            skip_broken=skip_broken,
            progress=_decoding(bar),
            left_out=_left_out,
            report=lambda e: bar.update(task, completed=e.step, description=f"training: {e.mean:.4f}"),
        )
    if save is not None:
        save.parent.mkdir(parents=True, exist_ok=True)
        save_file(result.weights, save)
    before = recorded_best(trial)
    found = asdict(result.best) | {"source_accuracy": result.best.mean, "recorded": before}
    if as_json:
        _out(line.as_json(found))
        return
    _out(f"source accuracy {result.best.mean:.6f} at step {result.best.step}")
    for name, accuracy in result.best.accuracy.items():
        _out(f"  {name} {accuracy:.6f}")
    if before is not None:
        _out(f"recorded {before:.6f}: {'identical' if before == result.best.mean else 'different'}")
    if differs:
        _out(f"versions differ: {differs}")


@app.command()
def toy(
    name: Annotated[str, typer.Argument(help="feature_contamination or gga_2d.")],
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each case.")] = 3,
    out: Annotated[Optional[Path], typer.Option(help="The picture, a PNG file; else NAME.png here.")] = None,  # noqa: UP045
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps: the effect's sign, not its size.")] = False,
) -> None:
    """Run a toy problem with a known answer: its figures and a picture. Example: dgsearch toy gga_2d --quick."""
    from dgsearch import toys
    from dgsearch.component import known_or_raise
    from dgsearch.report.tables import render

    known_or_raise("toy", name, toys.TOYS)
    picture = out or Path(f"{name}.png")
    results = toys.over_seeds(name, seeds=seeds, quick=quick, progress=lambda what: screen.print(what, markup=False))
    _out(render(toys.figure_frame(results), form="table", title=f"{name}: mean over {seeds} seeds ± standard error"))
    toys.draw(name, results, picture)
    _out(f"picture: {picture}")


def main() -> None:
    """Run the command line; a user's mistake is one line and exit code 2."""
    try:
        app()
    except OSError as error:
        from dgsearch.study import storage_fault

        where = f" ({error.filename})" if error.filename else ""
        said = storage_fault(error) or f"{error.strerror or error}{where}"
        screen.print(f"error: {said}", markup=False, soft_wrap=True)
        sys.exit(2)
    except ValueError as error:
        screen.print(f"error: {error}", markup=False, soft_wrap=True)
        sys.exit(2)
