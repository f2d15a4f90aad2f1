r"""What each method costs, as ratios in one run: optimizer steps, GGA's candidates, whole steps, epoch ends.

    python scripts/benchmarks/methods.py [--network mnist_cnn] [--network resnet18@none] [--repeats 15] [--threads 2] \
        [--cpu]

Every figure is the median over repeats of a part's seconds; the parts of one comparison take turns, so a change of
the machine's speed meets all alike. --cpu counts the process's CPU seconds, for a machine that others use. Images are
random: nothing here depends on what is learned. Batch norm is frozen.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable

import torch

from dgsearch.networks import build_network
from dgsearch.randomness import generator
from dgsearch.recipe import SLOTS
from dgsearch.step import Closure, DomainBatch, EpochEnd, Objective, Progress, Step

SIZES = {"mnist_cnn": (64, 28), "resnet18@none": (32, 64)}  # examples a domain, pixels
BATCHES = 32  # in an epoch: as many as the smallest domain of VLCS makes
DOMAINS, CLASSES, CANDIDATES = 3, 7, 4


class Setting:
    """A network, and batches of random images."""

    def __init__(self, network: str) -> None:
        size, pixels = SIZES[network]
        normalisation = ((0.5,) * 3, (0.25,) * 3)
        model = build_network(network, num_classes=CLASSES, normalisation=normalisation, seed=0, freeze_bn=True)
        self.model = model.to(memory_format=torch.channels_last)
        self.objective = Objective()
        self.batches = [self.batch(size, pixels, n) for n in range(BATCHES)]
        self.guide = self.batch(size * BATCHES // 10, pixels, BATCHES)
        self._fit_statistics()

    @torch.no_grad()
    def _fit_statistics(self) -> None:
        """Give batch norm the statistics of its input: with none, logits of random weights saturate the softmax."""
        norms = [m for m in self.model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
        for m in norms:
            m.train()
            m.momentum = 1.0
        self.model(self.batches[0].x)
        self.model.train()
        assert not any(m.training for m in norms)

    def batch(self, size: int, pixels: int, n: int) -> DomainBatch:
        x = torch.rand((DOMAINS, size, pixels, pixels, 3), generator=generator(n, "x")).movedim(-1, -3)
        y = torch.randint(0, CLASSES, (DOMAINS, size), generator=generator(n, "y"))
        index = torch.arange(n * size, (n + 1) * size).expand(DOMAINS, -1)
        return DomainBatch(x, y, index, tuple(range(DOMAINS)))

    def optimizer(self, component) -> torch.optim.Optimizer:
        small = dataclasses.replace(component, lr=1e-6)
        return small.build([{"params": list(self.model.parameters()), "part": "network", "lr_ratio": 1.0}], seed=0)

    def step(self, optimizer, gradient, n: int) -> None:
        batch, progress = self.batches[n % BATCHES], Progress(n, 1000)
        closure = Closure(self.model, self.objective, optimizer, batch, progress, seed=0)
        optimizer.step(gradient(Step(self.model, self.objective, batch, progress, closure)))


clock = time.perf_counter


def timed(parts: dict[str, Callable[[int], None]], repeats: int) -> dict[str, float]:
    """Return each part's median seconds; parts take turns, and the first two turns are not counted."""
    found: dict[str, list[float]] = {name: [] for name in parts}
    for n in range(repeats + 2):
        for name, part in parts.items():
            began = clock()
            part(n)
            if n >= 2:
                found[name].append(clock() - began)
    return {name: statistics.median(values) for name, values in found.items()}


def optimizer_figures(setting: Setting, repeats: int) -> dict[str, float]:
    """Time optimizer steps alone, on gradients that are there."""
    genie = SLOTS["optimizer"]["genie"]()
    parameters = list(setting.model.parameters())
    made = {
        "adam foreach": torch.optim.Adam(parameters, lr=1e-6, foreach=True),
        "adam fused": torch.optim.Adam(parameters, lr=1e-6, fused=True),
        "genie": setting.optimizer(genie),
        "genie, mask and noise off": setting.optimizer(dataclasses.replace(genie, mask=False, noise=False)),
    }
    Closure(setting.model, setting.objective, made["genie"], setting.batches[0], Progress(0, 1), seed=0)()
    gradients = [p.grad.clone() for p in parameters]

    def known() -> torch.Tensor:
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g
        return torch.zeros(())

    return timed({name: lambda n, o=optimizer: o.step(known) for name, optimizer in made.items()}, repeats)


def step_figures(setting: Setting, repeats: int) -> dict[str, float]:
    """Time whole steps; a candidate is a searching step less an ERM step, divided by its probes."""
    none = SLOTS["gradient"]["none"]().build(seed=0)
    gga = dataclasses.replace(SLOTS["gradient"]["gga"](), candidates=CANDIDATES, start=0.0, window=1.0).build(seed=0)
    gga_l = SLOTS["gradient"]["gga_l"]().build(seed=0)
    optimizer = setting.optimizer(SLOTS["optimizer"]["adam"]())
    swad = SLOTS["average"]["swad"]().build(setting.model)

    def averaged(n: int) -> None:
        setting.step(optimizer, none, n)
        swad.update(Progress(n, 1000))

    found = timed(
        {
            "erm step": lambda n: setting.step(optimizer, none, n),
            "gga step": lambda n: setting.step(optimizer, gga, n),
            "gga_l step": lambda n: setting.step(optimizer, gga_l, n),
            "swad step": averaged,
        },
        repeats,
    )
    found["gga candidate"] = (found.pop("gga step") - found["erm step"]) / (CANDIDATES + 1)  # and the origin's probe
    return found


def epoch_figures(setting: Setting, repeats: int, scopes: list[str]) -> dict[str, float]:
    """Time an ERM epoch and the epoch ends of iu."""
    none = SLOTS["gradient"]["none"]().build(seed=0)
    optimizer = setting.optimizer(SLOTS["optimizer"]["adam"]())
    train = [batch.domain(d) for d in range(DOMAINS) for batch in setting.batches]
    guide = [setting.guide.domain(d) for d in range(DOMAINS)]

    def epoch(n: int) -> None:
        for k in range(BATCHES):
            setting.step(optimizer, none, k)

    def ending(scope: str) -> Callable[[int], None]:
        end = SLOTS["epoch_end"]["iu"](scope=scope).build(seed=0)
        return lambda n: end(EpochEnd(setting.model, setting.objective, optimizer, train, guide, Progress(n + 1, 1000)))

    return timed({"erm epoch": epoch, **{f"iu {scope}": ending(scope) for scope in scopes}}, repeats)


def show(found: dict[str, float], base: str) -> None:
    for name, seconds in found.items():
        print(f"  {name:<28} {seconds * 1e3:9.2f} ms  {seconds / found[base]:6.2f} x {base}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=sorted(SIZES), action="append")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--scope", choices=("classifier", "network"), action="append")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    global clock
    clock = time.process_time if options.cpu else time.perf_counter
    torch.set_num_threads(options.threads)
    for network in options.network or sorted(SIZES):
        setting = Setting(network)
        count = sum(p.numel() for p in setting.model.parameters()) / 1e6
        size, pixels = SIZES[network]
        print(f"{network}: {DOMAINS} x {size} of {pixels} px, {count:.2f} M parameters, {options.threads} threads")
        show(optimizer_figures(setting, 4 * options.repeats), "adam foreach")
        show(step_figures(setting, options.repeats), "erm step")
        show(epoch_figures(setting, max(3, options.repeats // 4), options.scope or ["classifier"]), "erm epoch")


if __name__ == "__main__":
    main()
