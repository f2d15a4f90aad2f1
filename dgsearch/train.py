"""run_trial: one recipe trained on source domains only, judged on their validation parts."""

import contextlib
import hashlib
import io
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dgsearch.domains.batches import OpenSources, Sources
from dgsearch.networks import IMAGENET, Network, Normalisation, build_network, network_kind
from dgsearch.randomness import seed_of, seeded
from dgsearch.recipe import Recipe, encode
from dgsearch.step import (
    Closure,
    DomainBatch,
    EpochEnd,
    Progress,
    Step,
    cosines,
    domain_gradients,
    masks,
    probing,
    signal_to_noise,
)

CHECKPOINTS = ("checkpoint.pt", "checkpoint.previous.pt")  # the newest, and the one before
RESUMED = "resumed.jsonl"  # beside them, a line each time a trial goes on from one
DIGEST_BYTES = 32  # of the hash that ends a checkpoint
EVALUATIONS = 20  # a trial
WARM_UP = 2  # steps that a measurement leaves out
STATISTICS_BATCHES = 32  # that an average's batch-norm statistics are computed on


class StopTrial(Exception):  # noqa: N818 - a verdict, not an error
    """Raised by ``report`` to end a trial early."""


class DivergedError(RuntimeError):
    """A loss is no longer finite."""


@dataclass(frozen=True)
class Evaluation:
    """The validated weights' figures on each source's validation part after ``step`` steps.

    ``log`` holds diagnostics over the steps since the evaluation before; ``seconds`` is training time so far,
    over all sessions of the trial.
    """

    step: int
    accuracy: dict[str, float]
    loss: dict[str, float]
    log: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def mean(self) -> float:
        """Mean accuracy over source domains: what selects, in a trial and between trials."""
        return sum(self.accuracy.values()) / len(self.accuracy)

    @property
    def worst(self) -> float:
        """The least accuracy of a source domain."""
        return min(self.accuracy.values())


@dataclass(frozen=True)
class TrialResult:
    """A trial run to its end: every evaluation, the best one, and its weights (state dict, on the CPU)."""

    evaluations: tuple[Evaluation, ...]
    best: Evaluation
    weights: dict[str, Tensor]
    classes: tuple[str, ...]
    normalisation: Normalisation


def ignore(_: Evaluation) -> None:
    """Do nothing with an evaluation."""


def evaluation_steps(steps: int) -> list[int]:
    """Return after which steps a trial is evaluated: every 5 % of them, the last included."""
    return sorted({math.ceil(steps * k / EVALUATIONS) for k in range(1, EVALUATIONS + 1)})


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Write a file aside and put it in place in one move, on the disk before it is in place, and its name too."""
    aside = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None


def read_checkpoint(path: Path) -> bytes | None:
    """Return what a checkpoint holds, or None if it is not there or not as it was written."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    content, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    return content if hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest() == digest else None


@torch.no_grad()
def predict(model: nn.Module, batches: Iterable[DomainBatch]) -> tuple[Tensor, Tensor]:
    """Return logits [N, K] and class ids [N] of batches in order, in evaluation mode; the mode is put back."""
    mode = model.training
    model.eval()
    try:
        outputs = [(model(batch.x)[1].flatten(0, 1), batch.y.flatten()) for batch in batches]
    finally:
        model.train(mode)
    logits, y = zip(*outputs, strict=True)
    return torch.cat(logits), torch.cat(y)


@contextlib.contextmanager
def threads_of_torch(threads: int) -> Iterator[None]:
    """Compute with this many threads until the exit: results depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_trial(
    recipe: Recipe,
    sources: Sources,
    *,
    network: str,
    steps: int,
    seed: int,
    device: str | torch.device = "cpu",
    threads: int = 1,
    precision: str = "float32",
    report: Callable[[Evaluation], None] = ignore,
    checkpoint_dir: Path | None = None,
) -> TrialResult:
    """Train ``recipe`` on ``sources`` and return its evaluations and best weights by source validation.

    At each of 20 evaluations the full state is written to ``checkpoint_dir`` (where given), then ``report``
    is called, which may raise StopTrial. Called again with the same arguments it goes on from that state,
    to the same weights bit for bit, and reports the evaluation it found once more. A damaged state is passed
    over for the one before it, or for the beginning, and ``resumed.jsonl`` there says so.

    Raises:
        ValueError: if the recipe can't run on these sources, or the checkpoint is another trial's.
        DivergedError: if a loss is no longer finite.
        StopTrial: as ``report`` raised it.
    """
    with _begun(
        recipe,
        sources,
        network=network,
        steps=steps,
        seed=seed,
        device=device,
        threads=threads,
        precision=precision,
    ) as (trial, normalisation):
        facts = (trial.recipe, [d.fingerprint for d in sources.domains], sources.resolution, network, steps)
        trial.run(report, checkpoint_dir, identity=f"{seed_of(json.dumps(facts), seed, precision):x}")
    assert trial.best is not None
    return TrialResult(tuple(trial.evaluations), trial.best, trial.best_weights, sources.classes, normalisation)


@contextlib.contextmanager
def _begun(
    recipe: Recipe,
    sources: Sources,
    *,
    network: str,
    steps: int,
    seed: int,
    device: str | torch.device,
    threads: int,
    precision: str,
) -> Iterator[tuple["_Trial", Normalisation]]:
    """Open the sources and yield a trial at its first step, and the normalisation of its network."""
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    recipe = recipe.resolve(network)
    recipe.check(len(sources.domains))
    device = torch.device(device)
    with (
        threads_of_torch(threads),
        sources.open(seed=seed, device=device, withhold_guide=recipe.needs_guide) as opened,
    ):
        pretrained = network_kind(network) == "pretrained"
        normalisation = IMAGENET if pretrained else opened.normalisation()
        num_classes = len(sources.classes)
        model = build_network(
            network,
            num_classes=num_classes,
            normalisation=normalisation,
            seed=seed,
            dropout=recipe.training.dropout,
            freeze_bn=bool(recipe.training.freeze_bn),
            precision=precision,
        ).to(device)
        model.to(memory_format=torch.channels_last)
        yield _Trial(recipe, model, opened, steps=steps, seed=seed, num_classes=num_classes), normalisation


@dataclass(frozen=True)
class Cost:
    """What a trial of a recipe costs: seconds a step, an evaluation and an epoch's end.

    A ``step`` is the mean of all: some may cost more. ``epoch_steps`` is how many steps an epoch's end comes after;
    ``weights`` and ``record`` are the bytes of its weights and of an evaluation as JSON.
    """

    step: float
    evaluation: float
    epoch_end: float
    epoch_steps: int
    weights: int
    record: int

    def seconds(self, steps: int) -> float:
        """Return the seconds of a whole trial."""
        evaluations = len(evaluation_steps(steps)) * self.evaluation
        return steps * self.step + evaluations + steps // self.epoch_steps * self.epoch_end


def measure(
    recipe: Recipe,
    sources: Sources,
    *,
    network: str,
    steps: int,
    seed: int,
    device: str | torch.device = "cpu",
    threads: int = 1,
    precision: str = "float32",
    most_steps: int = 20,
    most_seconds: float = 5.0,
) -> Cost:
    """Measure what a recipe's trial of ``steps`` costs here, on up to 20 of its steps or 5 s of them.

    The first two steps are left out: they allocate and compile. Where a gradient intervention works in a ``window``
    of steps only, as many of those are timed apart, and each kind counts as often as it occurs. An evaluation and an
    epoch's end, where it does something, are timed once. Nothing is kept.

    Raises:
        ValueError: as ``run_trial``.
    """
    with _begun(
        recipe,
        sources,
        network=network,
        steps=max(steps, WARM_UP + most_steps + 1),  # no component is asked to go past its last step
        seed=seed,
        device=device,
        threads=threads,
        precision=precision,
    ) as (trial, _):

        def timed(work: Callable[[], Any]) -> float:
            began = time.perf_counter()
            work()
            if trial.sources.device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - began

        def mean(steps: Iterable[int]) -> float:
            took: list[float] = []
            for step in steps:
                if len(took) == most_steps or sum(took) >= most_seconds:
                    break
                trial.step = step
                took.append(timed(trial.train_step))
            return sum(took) / len(took)

        every, trial.epoch_steps = trial.epoch_steps, trial.steps + 1  # an epoch's end is timed apart
        window = getattr(trial.gradient, "window", lambda _: range(0))(trial.steps)
        others = [step for step in range(trial.steps) if step not in window]
        if len(others) <= WARM_UP:
            others, window = list(range(trial.steps)), range(0)
        for step in others[:WARM_UP]:
            trial.step = step
            trial.train_step()
        seconds = mean(others[WARM_UP:])
        if window:
            seconds += (mean(window) - seconds) * len(window) / trial.steps
        trial.step = others[-1]
        batch = trial.train_step()
        evaluation = timed(lambda: trial.evaluate(batch, seconds=seconds))
        record = len(json.dumps(asdict(trial.evaluations[-1])))
        epoch_end = timed(trial.end_epoch)
        weights = sum(v.numel() * v.element_size() for v in trial.best_weights.values())
    return Cost(seconds, evaluation, epoch_end, every, weights, record)


class _Trial:
    """The state of a running trial, and its loop."""

    def __init__(
        self,
        recipe: Recipe,
        model: Network,
        sources: OpenSources,
        *,
        steps: int,
        seed: int,
        num_classes: int,
    ) -> None:
        self.recipe = encode(recipe)
        self.model = model
        self.sources = sources
        self.steps = steps
        self.seed = seed
        self.batch_size = int(recipe.training.batch_size or 0)
        self.augment = str(recipe.training.augment)
        self.objective = seeded(
            lambda: recipe.objective.build(  # type: ignore[attr-defined]
                num_domains=len(sources.names), num_features=model.num_features, num_classes=num_classes
            ),
            seed,
            "objective",
        ).to(sources.device)
        network_group = {"params": list(model.parameters()), "part": "network", "lr_ratio": 1.0}
        own = [{**group, "part": "objective"} for group in self.objective.parameter_groups()]
        self.optimizer = recipe.optimizer.build([network_group, *own], seed=seed)  # type: ignore[attr-defined]
        self.gradient = recipe.gradient.build(seed=seed)  # type: ignore[attr-defined]
        self.epoch_end = recipe.epoch_end.build(seed=seed)  # type: ignore[attr-defined]
        self.average = recipe.average.build(model)  # type: ignore[attr-defined]
        shortest = min(len(positions) for positions in sources.trained_on)
        every = getattr(self.epoch_end, "every", 0)  # a share of training; 0 is an epoch of the shortest domain
        self.epoch_steps = max(1, round(every * steps)) if every else math.ceil(shortest / self.batch_size)
        self.step = 0
        self.seconds = 0.0
        self.evaluations: list[Evaluation] = []
        self.best: Evaluation | None = None
        self.best_weights: dict[str, Tensor] = {}
        self.edits: dict[str, float] = {}  # what the last epoch-end edit had to say
        self._means: dict[str, list[Tensor]] = {}  # since the last evaluation

    def run(self, report: Callable[[Evaluation], None], checkpoint_dir: Path | None, *, identity: str) -> None:
        """Train to the end, from a checkpoint where there is one."""
        if checkpoint_dir is not None and self.load(checkpoint_dir, identity):
            report(self.evaluations[-1])
        at = set(evaluation_steps(self.steps))
        began = time.perf_counter() - self.seconds
        while self.step < self.steps:
            batch = self.train_step()
            if self.step not in at:
                continue
            evaluation = self.evaluate(batch, seconds=time.perf_counter() - began)
            self.seconds = evaluation.seconds
            if checkpoint_dir is not None:
                self.save(checkpoint_dir, identity)
            report(evaluation)

    def train_step(self) -> DomainBatch:
        """Do one step and what follows it; return its batch."""
        before = Progress(self.step, self.steps)
        batch = self.sources.batch(self.step, size=self.batch_size, augment=self.augment)
        closure = Closure(self.model, self.objective, self.optimizer, batch, before, seed=self.seed)
        self.optimizer.step(self.gradient(Step(self.model, self.objective, batch, before, closure)))
        assert closure.losses is not None, "the optimizer or the gradient intervention never called the closure"
        for name, value in {"train/loss": closure.losses.total, **closure.log}.items():
            self._means.setdefault(name, []).append(value)
        self.step += 1
        if self.step % self.epoch_steps == 0:
            self.end_epoch()
        self.average.update(Progress(self.step, self.steps))
        return batch

    def end_epoch(self) -> None:
        """Let the epoch-end intervention edit the weights."""
        train, guide = self.sources.part("train"), self.sources.part("guide")
        after = Progress(self.step, self.steps)
        self.edits = self.epoch_end(EpochEnd(self.model, self.objective, self.optimizer, train, guide, after))

    def evaluate(self, batch: DomainBatch, *, seconds: float) -> Evaluation:
        """Validate the weights that the average yields, and keep them if they are the best yet."""
        raw = self.validate()
        self.average.observe(sum(loss for _, loss in raw.values()) / len(raw), Progress(self.step, self.steps))
        log = {name: torch.stack(values).mean().item() for name, values in self._means.items()}
        self._means.clear()
        log |= self.diagnostics(batch) | self.edits
        weights = self.average.weights()
        with _swapped(self.model, weights), contextlib.nullcontext() if weights is None else probing(self.model):
            if weights is not None:
                self.refresh_statistics()
            figures = raw if weights is None else self.validate()
            evaluation = Evaluation(
                self.step,
                {name: accuracy for name, (accuracy, _) in figures.items()},
                {name: loss for name, (_, loss) in figures.items()},
                log,
                seconds,
            )
            if not all(math.isfinite(v) for v in (log["train/loss"], *evaluation.loss.values())):
                raise DivergedError(f"not finite after {self.step} steps: training loss {log['train/loss']:g}")
            if self.best is None or evaluation.mean > self.best.mean:
                self.best = evaluation
                self.best_weights = {
                    name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
                    for name, value in self.model.state_dict().items()
                }
        self.evaluations.append(evaluation)
        return evaluation

    def validate(self) -> dict[str, tuple[float, float]]:
        """Return accuracy and mean cross-entropy on each source's validation part."""
        found = {}
        for d, name in enumerate(self.sources.names):
            logits, y = predict(self.model, self.sources.part("validation", domain=d))
            accuracy = (logits.argmax(1) == y).double().mean().item()
            found[name] = (accuracy, functional.cross_entropy(logits.double(), y).item())
        return found

    @torch.no_grad()
    def refresh_statistics(self) -> None:
        """Compute live batch norm's statistics anew for the weights that an average yields, on recent batches."""
        live = [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
        if not live:
            return
        momenta = [m.momentum for m in live]
        for m in live:
            m.reset_running_stats()
            m.momentum = None  # the mean over all batches seen
        for t in range(max(0, self.step - STATISTICS_BATCHES), self.step):
            batch = self.sources.batch(t, size=self.batch_size, augment=self.augment)
            with masks(self.model, domains=batch.domains, draw=(self.seed, t)):
                self.model(batch.x)
        for m, momentum in zip(live, momenta, strict=True):
            m.momentum = momentum

    def diagnostics(self, batch: DomainBatch) -> dict[str, float]:
        """Return the agreement and signal-to-noise of domain gradients on the step's batch, at the raw weights.

        An optimizer that keeps moments of its own adds what it makes of them.
        """
        batches = sum(map(len, self.sources.trained_on)) / batch.y.numel()
        own = getattr(self.optimizer, "diagnostics", None)
        found: dict[str, float] = {} if own is None else own(batches=batches)
        if len(batch.domains) < 2:
            return found
        progress = Progress(self.step - 1, self.steps)  # the masks of the step just done
        with masks(self.model, self.objective, domains=batch.domains, draw=(self.seed, progress.step)):
            _, gradients = domain_gradients(self.model, self.objective, batch, progress)
        pairs = cosines(gradients)
        over, ratio = signal_to_noise(gradients, batches=batches)
        return found | {
            "gradient_agreement/mean": pairs.mean().item(),
            "gradient_agreement/min": pairs.min().item(),
            "domains/gsnr_share_over_1": over,
            "domains/osgr": ratio,
        }

    @property
    def _stateful(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("model", "objective", "optimizer", "epoch_end", "average")}

    def save(self, folder: Path, identity: str) -> None:
        """Write the full state and a hash of it aside, and put it in place; the one before it is kept."""
        state = {
            "identity": identity,
            "step": self.step,
            "seconds": self.seconds,
            "evaluations": [asdict(e) for e in self.evaluations],
            "best": self.evaluations.index(self.best) if self.best else None,
            "best_weights": self.best_weights,
            "edits": self.edits,
            **{name: part.state_dict() for name, part in self._stateful.items()},
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        with buffer.getbuffer() as content:
            digest = hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()
        buffer.seek(0, os.SEEK_END)
        buffer.write(digest)
        newest, previous = (folder / name for name in CHECKPOINTS)
        with contextlib.suppress(FileNotFoundError):
            os.replace(newest, previous)
        write_whole(newest, buffer.getbuffer())

    def load(self, folder: Path, identity: str) -> bool:
        """Take the newest whole state that ``save`` wrote, and note it; return whether there was one."""
        there = [path for name in CHECKPOINTS if (path := folder / name).exists()]
        whole = next(((path, content) for path in there if (content := read_checkpoint(path)) is not None), None)
        damaged = there if whole is None else there[: there.index(whole[0])]
        if whole is not None:
            self._restore(*whole, identity)
        if there:
            with (folder / RESUMED).open("a") as file:
                file.write(json.dumps({"step": self.step, "damaged": [path.name for path in damaged]}) + "\n")
        for path in damaged:  # lest it becomes the one before
            path.unlink()
        return whole is not None

    def _restore(self, path: Path, content: bytes, identity: str) -> None:
        state = torch.load(io.BytesIO(content), map_location=self.sources.device, weights_only=True)
        if state["identity"] != identity:
            raise ValueError(f"the checkpoint {path} belongs to a trial with other settings")
        self.step, self.seconds, self.edits = state["step"], state["seconds"], state["edits"]
        self.evaluations = [Evaluation(**e) for e in state["evaluations"]]
        self.best = self.evaluations[state["best"]]
        self.best_weights = {k: v.cpu() for k, v in state["best_weights"].items()}
        for name, part in self._stateful.items():
            part.load_state_dict(state[name])


@contextlib.contextmanager
def _swapped(model: nn.Module, weights: dict[str, Tensor] | None) -> Iterator[None]:
    """Give the model other parameters until the exit; None leaves its own."""
    parameters = dict(model.named_parameters())
    own = {} if weights is None else {name: parameters[name].detach().clone() for name in weights}
    with torch.no_grad():
        for name in own:
            parameters[name].copy_((weights or {})[name])
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in own.items():
                parameters[name].copy_(value)
