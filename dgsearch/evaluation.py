"""Evaluation: the only module that opens a held-out domain. It needs a selection, and records each opening."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from sklearn.metrics import f1_score

from dgsearch.domains.batches import CHUNK
from dgsearch.domains.cache import open_images, readable
from dgsearch.domains.layout import DomainIndex, class_names, domain_names, read_domain
from dgsearch.networks import build_network
from dgsearch.selection import Selected, Selection, selected_trial
from dgsearch.step import DomainBatch
from dgsearch.study import Fold, Study, append_line, read_json, write_json
from dgsearch.train import predict, threads_of_torch

FILE = "evaluation.json"


@dataclass(frozen=True)
class Evaluated(Selected):
    """A fold's selected trial, and how it does on the domains held out; None where a fold holds none out.

    ``unknown_classes`` are classes of the held-out domains that no source has.
    """

    target_accuracy: float | None
    target_macro_f1: float | None
    unknown_classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """The evaluation of a selection."""

    criterion: str
    folds: tuple[Evaluated, ...]
    read: str

    @classmethod
    def load(cls, study: Study) -> "Report | None":
        """Read a study's evaluation, if it has one."""
        path = study.path / FILE
        if not path.is_file():
            return None
        values = read_json(path)
        unknown = [tuple(f.get("unknown_classes", ())) for f in values["folds"]]
        folds = zip(values["folds"], unknown, strict=True)
        return cls(**values | {"folds": tuple(Evaluated(**f | {"unknown_classes": u}) for f, u in folds)})


def evaluate(
    study: Study,
    selection: Selection,
    *,
    cache_dir: Path,
    device: str = "cpu",
    skip_broken: bool = False,
    progress: Callable[[str], None] = lambda name: None,
    left_out: Callable[[str, int], None] = lambda name, count: None,
) -> Report:
    """Open each fold's held-out domains and measure its selected trial on them.

    Accuracy is over all held-out images, one of a class that no source has counting as wrong; macro-F1 is over
    the sources' classes. An opening is recorded before it is made. With ``skip_broken``, images that can't be read are
    not counted: ``left_out(domain, count)``.

    Raises:
        ValueError: if a held-out domain or the weights are missing, or an image can't be read.
    """
    pairs = list(zip(study.folds, selection.folds, strict=True))
    weights = [_weights(study, fold, selected) for fold, selected in pairs]
    if any(fold.held_out for fold in study.folds):
        domain_names(study.specification.data)  # before anything is opened: all that can be known to fail
    folds = []
    for (fold, selected), state in zip(pairs, weights, strict=True):
        targets = []
        for name in fold.held_out:
            progress(name)
            opening = {"time": time.time(), "fold": fold.number, "trial": selected.trial, "domain": name}
            append_line(study.path / "openings.jsonl", opening)
            index = read_domain(study.specification.data, name)
            kept = readable(
                index,
                resolution=study.specification.resolution,
                cache_dir=cache_dir,
                skip_broken=skip_broken,
            )
            if len(kept) < len(index):
                left_out(name, len(index) - len(kept))
            targets.append(kept)
        classes = class_names([DomainIndex.load(study.index_path(name)) for name in fold.sources])
        figures = _measure(study, state, targets, classes, cache_dir, device) if targets else (None, None)
        unknown = tuple(name for name in class_names(targets) if name not in classes)
        folds.append(
            Evaluated(**vars(selected), target_accuracy=figures[0], target_macro_f1=figures[1], unknown_classes=unknown)
        )
    report = Report(selection.criterion, tuple(folds), selection.read)
    write_json(study.path / FILE, asdict(report))
    return report


def _weights(study: Study, fold: Fold, selected: Selected) -> dict[str, torch.Tensor]:
    _, path = selected_trial(study, fold, selected)
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"the weights {path} are damaged: {error}") from None


def _measure(
    study: Study,
    state: dict[str, torch.Tensor],
    targets: list[DomainIndex],
    classes: tuple[str, ...],
    cache_dir: Path,
    device: str,
) -> tuple[float, float]:
    specification = study.specification
    model = build_network(
        specification.network,
        num_classes=len(classes),
        normalisation=((0.0,) * 3, (1.0,) * 3),  # the weights bring the sources' own
        seed=0,
        precision=specification.precision,
        initial=False,
    )
    model.load_state_dict(state)
    model.to(device).to(memory_format=torch.channels_last)
    predicted, truth = [], []
    ids = {name: k for k, name in enumerate(classes)}
    with threads_of_torch(specification.threads):
        for index in targets:
            images = open_images(index, resolution=specification.resolution, cache_dir=cache_dir)
            labels = np.array([ids.get(label, -1) for label in index.labels])
            for start in range(0, len(index), CHUNK):
                rows = slice(start, start + CHUNK)
                x = torch.from_numpy(np.array(images[rows])).to(device).movedim(-1, -3).float().div_(255)
                y = torch.from_numpy(labels[rows])
                batch = DomainBatch(x.unsqueeze(0), y.unsqueeze(0), y.unsqueeze(0), (0,))
                predicted.append(predict(model, [batch])[0].argmax(1).cpu().numpy())
                truth.append(labels[rows])
    guess, right = np.concatenate(predicted), np.concatenate(truth)
    accuracy = float((guess == right).mean())
    f1 = f1_score(right, guess, labels=range(len(classes)), average="macro", zero_division=0)
    return accuracy, float(f1)
