"""Progress of a search: a line for each trial that ends."""

import time

from rich.console import Console

from dgsearch.study import Study, TrialRecord

SAID = ("reason", "note")  # of a result


class TrialLines:
    """Prints a line when a trial ends: how many are done, what it reached, and about how long is left."""

    def __init__(self, study: Study, *, trials: int, console: Console) -> None:
        self.folds = study.folds
        self.console = console
        self.began = time.monotonic()
        ended = [t for fold in study.folds for t in study.trials(fold.number) if t.result]
        self.done = self.before = len(ended)
        self.total = max(trials * len(study.folds), self.done)
        self.best: dict[int, float] = {}
        for trial in ended:
            self._take(trial)
        if self.before:
            console.print(f"going on: {self.before} of {self.total} trials have ended")

    def __call__(self, kind: str, record: TrialRecord) -> None:
        """Print what happened to a trial."""
        held_out = ", ".join(self.folds[record.fold].held_out) or "none"
        said = {
            "retry": f"t{record.number:04d} {record.family} ran out of memory and is tried again, on a whole device",
            "given up": f"the family {record.family} is GIVEN UP: each trial of it so far failed",
        }.get(kind)
        if said is not None:
            self.console.print(f"held out: {held_out}  {said}", markup=False, soft_wrap=True)
        if kind != "end":
            return
        self.done += 1
        self._take(record)
        score = f"{record.best.mean:.3f}" if record.best else "  -  "
        best = f"{self.best[record.fold]:.3f}" if record.fold in self.best else "  -  "
        left = (time.monotonic() - self.began) / (self.done - self.before) * max(self.total - self.done, 0)
        self.console.print(
            f"[{self.done:>{len(str(self.total))}}/{self.total}] held out: {held_out:<12} "
            f"t{record.number:04d} {record.family:<12} {record.state:<8} {score} (best {best}) "
            f"about {_clock(left)} left" + "".join(f"  {record.result[k]}" for k in SAID if record.result.get(k)),
            markup=False,
            soft_wrap=True,
        )

    def _take(self, record: TrialRecord) -> None:
        if record.state == "complete" and record.best:
            self.best[record.fold] = max(self.best.get(record.fold, 0.0), record.best.mean)


def _clock(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"
