"""A search's real trial, as a worker runs it: an assignment trained, its best weights left in its folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save

from dgsearch.domains.batches import Sources
from dgsearch.domains.cache import default_cache_dir
from dgsearch.domains.layout import DomainIndex
from dgsearch.networks import weights_file
from dgsearch.recipe import decode
from dgsearch.search.engine import Assignment, Outcome, Report
from dgsearch.train import run_trial, write_whole


@dataclass(frozen=True)
class Training:
    """What all trials of a search share. Called with an assignment, it trains it.

    ``cache_dir`` None is the default of the machine that trains.
    """

    network: str
    steps: int
    resolution: int
    seed: int
    device: str
    threads: int
    precision: str
    cache_dir: Path | None
    cache: str = "disk"

    def __call__(self, assignment: Assignment, report: Report) -> Outcome:
        """Train the assignment's recipe on its sources."""
        indexes = tuple(DomainIndex.load(Path(path)) for path in assignment.sources)
        folder = Path(assignment.folder)
        if self.device == "cuda":
            torch.cuda.empty_cache()  # of an earlier trial in this process
        result = run_trial(
            decode(assignment.recipe),
            Sources(indexes, self.resolution, self.cache_dir or default_cache_dir(), self.cache),
            network=self.network,
            steps=self.steps,
            seed=self.seed,
            device=self.device,
            threads=self.threads,
            precision=self.precision,
            report=report,
            checkpoint_dir=folder,
        )
        write_whole(folder / "weights.safetensors", save(result.weights))
        return Outcome("complete", weights="weights.safetensors")

    def look(self, sources: Sequence[str]) -> None:
        """Read a little of what trials of these source indexes need: a first image each, and the network's weights.

        Raises:
            OSError, ValueError: if this machine can't, naming the file.
        """
        weights_file(self.network)
        for path in sources:
            index = DomainIndex.load(Path(path))
            with (Path(index.root) / index.paths[0]).open("rb") as file:
                file.read(1)
