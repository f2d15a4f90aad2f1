"""The nodes of a Ray cluster: how many trials each holds, and whether it sees what a trial needs."""

import importlib.metadata
import platform
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

Look = Callable[[Sequence[str]], None]
"""Reads a little of what the trials of these source indexes need; raises an OSError or a ValueError if it can't."""

PATIENCE = 300.0  # seconds a node has to answer: it imports torch from storage that may be slow
AGAIN = 60.0  # seconds until a node that saw too little is asked again
SIGHT = 10.0  # seconds a worker waits for its trial's folder: network storage shows a new one late
GONE = (
    ray.exceptions.NodeDiedError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.TaskUnschedulableError,
    ray.exceptions.LocalRayletDiedError,
)
PACKAGES = ("dgsearch", "torch", "numpy")


def versions() -> dict[str, str]:
    """Return the versions that a node must share with the driver."""
    return {"Python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES}


def room(resources: dict[str, float], *, cpus: float, gpus: float) -> int:
    """Return how many trials of ``cpus`` and ``gpus`` a node holds. A share of a GPU lies on one GPU."""
    fits = [_times(resources.get("CPU", 0), cpus)] if cpus else []
    if gpus:
        whole = resources.get("GPU", 0)
        fits.append(_times(whole, gpus) if gpus >= 1 else int(whole) * _times(1, gpus))
    return min(fits, default=0)


def _times(total: float, part: float) -> int:
    return int(total / part + 1e-9)


@dataclass(frozen=True)
class Needs:
    """What a node must see: the study, known by what the driver wrote there, and what ``look`` reads."""

    study: Path
    folder: Path  # of the session, in the study
    mark: str
    sources: tuple[str, ...]  # index files
    look: Look | None
    versions: dict[str, str]

    @classmethod
    def of(cls, study: Path, session: str, sources: Sequence[str], look: Look | None) -> "Needs":
        """Leave the driver's mark in the session's folder, and describe what is needed."""
        folder = study.resolve() / "sessions" / session
        mark = uuid.uuid4().hex
        (folder / "mark").write_text(mark)
        return cls(study.resolve(), folder, mark, tuple(sources), look, versions())

    def lacking(self) -> str | None:
        """Return what is wrong on the node that this runs on, or None."""
        here = versions()
        other = ", ".join(f"{name} {here[name]} instead of {v}" for name, v in self.versions.items() if here[name] != v)
        if other:
            return f"has {other}"
        try:
            if (self.folder / "mark").read_text() != self.mark:
                return f"has another study at {self.study}"
        except OSError as error:
            return f"can't see the study {self.study} ({error.strerror})"
        return cannot_write(self.folder) or cannot_see(self.look, self.sources)


def cannot_write(folder: Path) -> str | None:
    """Return why this process can't write in a folder, or None."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"can't write in {folder} ({error.strerror})"


def cannot_see(look: Look | None, sources: Sequence[str]) -> str | None:
    """Return why this process can't read what trials of these sources need, or None."""
    try:
        if look is not None:
            look(sources)
    except OSError as error:
        return f"can't see {error.filename} ({error.strerror})" if error.filename else f"can't read: {error}"
    except ValueError as error:
        return str(error)
    return None


class UnseenError(Exception):
    """A worker's node does not see what its trial needs: not the trial's fault, which runs elsewhere."""


def await_sight(folder: Path, look: Look | None, sources: Sequence[str]) -> None:
    """Wait until this process can write in a trial's folder and read its sources.

    Raises:
        UnseenError: if it still can't after ``SIGHT`` seconds.
    """
    end = time.monotonic() + SIGHT
    while (complaint := cannot_write(folder) or cannot_see(look, sources)) is not None:
        if time.monotonic() > end:
            raise UnseenError(f"node {platform.node()} {complaint}")
        time.sleep(0.5)


# In a worker process that ends with the call: no trial runs where sources other than its own were opened.
@ray.remote(num_cpus=0, max_retries=0, max_calls=1)
def _lacking(needs: Needs) -> str | None:
    return needs.lacking()


def _cordon(node: str, resources: dict[str, float]) -> Any:
    """Hold a node's resources, so that Ray places no trial there, until the handle is dropped."""

    class Cordon:  # here, so that Ray sends its code: the node may not have this package
        pass

    on = NodeAffinitySchedulingStrategy(node, soft=False)
    held = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0)}
    return ray.remote(Cordon).options(**held, scheduling_strategy=on).remote()


@dataclass(eq=False)
class _Node:
    """A node with room for trials. It counts once it has been seen to have what they need."""

    name: str
    room: int
    resources: dict[str, float]
    sees: bool | None = None  # None: not known yet
    asked: Any = None  # the question under way
    since: float = 0.0  # when it was asked
    complaint: str = ""
    cordon: Any = field(default=None, repr=False)


class Nodes:
    """The cluster's nodes, watched while they come and go.

    Each is asked, in a task of its own there, whether it sees the study and the data; the driver's own does. One
    that does not gets no trial, is named to ``say``, and is asked again after a minute.
    """

    def __init__(
        self, needs: Needs, *, cpus: float, gpus: float, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self.needs = needs
        self.cpus = cpus
        self.gpus = gpus
        self.say = say
        self.home = ray.get_runtime_context().get_node_id()
        self.nodes: dict[str, _Node] = {}
        self._looked = -1.0

    def check(self) -> None:
        """Wait for every node's answer.

        Raises:
            ValueError: if a node lacks something, or there is no room for a trial on any.
        """
        self._list()
        if not self.nodes:
            total = ray.cluster_resources()
            raise ValueError(
                f"no room for a trial of {self.cpus:g} CPUs and {self.gpus:g} GPUs on any node of the cluster: it has "
                f"{total.get('CPU', 0):g} CPUs and {total.get('GPU', 0):g} GPUs in all"
            )
        asked = [n.asked for n in self.nodes.values() if n.asked is not None]
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=PATIENCE)
        self._hear(late=True)
        lacking = [f"node {n.name} {n.complaint}" for n in self.nodes.values() if n.sees is False]
        if lacking:
            raise ValueError(
                f"{'; '.join(lacking)}: data, study and this environment must be the same on every node that has "
                "room for a trial"
            )

    def room(self) -> int:
        """Return how many trials the nodes hold that see what trials need; looks at most once a second."""
        now = time.monotonic()
        if now > self._looked + 1:
            self._looked = now
            self._list()
            blind = [n for n in self.nodes.values() if n.sees is False]
            self._hear()
            for node in self.nodes.values():
                if node.sees is False and node not in blind:
                    self.say(f"node {node.name} {node.complaint}: it gets no trials until it does")
                elif node.sees and node in blind:
                    self.say(f"node {node.name} now sees data and study: it gets trials")
        return sum(n.room for n in self.nodes.values() if n.sees)

    def doubt(self) -> None:
        """Ask every node again: a worker has died, or did not see its trial's files."""
        for id_, node in self.nodes.items():
            if id_ != self.home and node.sees and node.asked is None:
                self._ask(id_, node)

    def _list(self) -> None:
        """Take up nodes that came, drop those that went, ask those whose answer is not known."""
        alive = {n["NodeID"]: n for n in ray.nodes() if n["Alive"]}
        for id_ in self.nodes.keys() - alive.keys():
            del self.nodes[id_]
        for id_, facts in alive.items():
            fits = room(facts["Resources"], cpus=self.cpus, gpus=self.gpus)
            if fits < 1:
                continue
            if id_ not in self.nodes:
                name = f"{facts['NodeManagerHostname']} ({facts['NodeManagerAddress']})"
                self.nodes[id_] = _Node(name, fits, facts["Resources"], sees=True if id_ == self.home else None)
            node = self.nodes[id_]
            waited = time.monotonic() - node.since
            if node.asked is None and (node.sees is None or (node.sees is False and waited > AGAIN)):
                self._ask(id_, node)

    def _ask(self, id_: str, node: _Node) -> None:
        on = NodeAffinitySchedulingStrategy(id_, soft=False)
        node.asked = _lacking.options(scheduling_strategy=on).remote(self.needs)
        node.since = time.monotonic()

    def _hear(self, *, late: bool = False) -> None:
        """Take the answers that have come; ``late``: one that has not come is one too."""
        for id_, node in self.nodes.items():
            if node.asked is None:
                continue
            came = bool(ray.wait([node.asked], timeout=0)[0])
            if not came and not late and time.monotonic() < node.since + PATIENCE:
                continue
            node.sees, node.complaint = _answer(node.asked) if came else (False, f"gives no answer in {PATIENCE:.0f} s")
            node.asked = None
            if node.sees is not False:
                node.cordon = None
            elif node.cordon is None:
                node.cordon = _cordon(id_, node.resources)


def _answer(asked: Any) -> tuple[bool | None, str]:
    """Return whether the node sees what is needed (None: it or its worker died, ask again), and what it lacks."""
    try:
        complaint = ray.get(asked)
    except GONE:
        return None, ""
    except ray.exceptions.RayError as error:  # dgsearch, or what it imports, is not there
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = next((line for line in reversed(lines) if line.startswith("ModuleNotFoundError")), lines[0])
        return False, f"can't run dgsearch ({reason}): install the same environment there"
    return complaint is None, complaint or ""
