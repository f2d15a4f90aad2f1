"""The cost of iu's epoch end in ERM training epochs, measured in one run: python scripts/benchmarks/_iu.py [N]."""

import sys
import time

import torch
from torch import nn
from torchvision.models import resnet18

from dgsearch.epoch_end.iu import Iu
from dgsearch.networks import Network, mnist_cnn
from dgsearch.objectives.erm import Erm
from dgsearch.optimizers.adam import Adam
from dgsearch.step import Closure, DomainBatch, EpochEnd, Progress

N = int(sys.argv[1]) if len(sys.argv) > 1 else 1152  # training examples a domain


def backbone() -> tuple[nn.Module, int]:
    net = resnet18(weights=None)
    net.fc = nn.Identity()
    return net, 512


def part(count: int, size: int, seed: int) -> list[DomainBatch]:
    g = torch.Generator().manual_seed(seed)
    found = []
    for d in range(3):
        for start in range(0, count, 256):
            n = min(256, count - start)
            x = torch.rand(1, n, size, size, 3, generator=g).movedim(-1, -3) * (0.6 + 0.2 * d)
            found.append(DomainBatch(x, torch.randint(0, 7, (1, n), generator=g), torch.arange(n)[None] + start, (d,)))
    return found


for make, size, batch_size, frozen in ((mnist_cnn, 28, 64, False), (backbone, 64, 32, True)):
    torch.manual_seed(0)
    featurizer, width = make()
    model = Network(featurizer, width, 7, normalisation=((0.5,) * 3, (0.3,) * 3), freeze_bn=frozen)
    model.to(memory_format=torch.channels_last)
    objective = Erm().build(num_domains=3, num_features=width, num_classes=7)
    optimizer = Adam(lr=1e-3).build([{"params": list(model.parameters()), "part": "network"}], seed=0)
    train, guide = part(N, size, 0), part(N // 9, size, 1)
    x = torch.stack([torch.cat([b.x[0] for b in train if b.domains == (d,)]) for d in range(3)])
    y = torch.stack([torch.cat([b.y[0] for b in train if b.domains == (d,)]) for d in range(3)])
    times = []
    for _ in range(3):
        began = time.perf_counter()
        for t in range(N // batch_size):
            rows = slice(t * batch_size, (t + 1) * batch_size)
            batch = DomainBatch(x[:, rows], y[:, rows], torch.arange(N)[None, rows].expand(3, -1), (0, 1, 2))
            optimizer.step(Closure(model, objective, optimizer, batch, Progress(t, 100), seed=0))
        times.append(time.perf_counter() - began)
    base = min(times[1:])  # the first warms up
    end = EpochEnd(model, objective, optimizer, train, guide, Progress(1, 10))
    for options in ({}, {"scope": "network"}, {"parts": "set"}, {"parts": "channels"}):
        began = time.perf_counter()
        log = Iu(**options).build(seed=0)(end)
        print(
            f"{make.__name__} epoch {base:.1f} s, {options or 'default'}: "
            f"{(time.perf_counter() - began) / base:.2f} epochs, {log}",
            flush=True,
        )
