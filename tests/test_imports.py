"""The direction of imports: every room imports only rooms above it, and each library has its one room."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "dgsearch"
ROOMS = [
    "component", "randomness", "step", "networks", "domains", "objectives", "optimizers", "gradient", "epoch_end",
    "average", "recipe", "search_space", "train", "lease", "study", "selection", "evaluation", "search", "tracking",
    "report", "toys", "line", "cli", "__main__",
]  # fmt: skip
SLOTS = {"objectives", "optimizers", "gradient", "epoch_end", "average"}
ONLY_IN = {
    "optuna": ["search/engine.py"],
    "ray": ["search/ray_tune.py", "search/nodes.py"],
    "mlflow": ["tracking/"],
}
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "dgsearch" and len(parts) > 1 and parts[1] in ROOMS else None


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_room_imports_only_rooms_above_it(path):
    name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if name == "__init__":
        return
    assert name in ROOMS, f"{name} has no place in the order of rooms"
    for module in imports(path):
        other = room(module)
        if other is None or other == name:
            continue
        assert ROOMS.index(other) < ROOMS.index(name), f"{path} imports {module}, a room below it"
        assert not (other in SLOTS and name in SLOTS), f"{path} imports {module}: slots never import one another"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_each_library_has_its_one_room(path):
    where = str(path.relative_to(PACKAGE))
    for library, allowed in ONLY_IN.items():
        if any(where.startswith(place) for place in allowed):
            continue
        used = {m for m in imports(path) if m.split(".")[0] == library}
        assert not used, f"{where} imports {sorted(used)}: only {allowed} may"


def test_only_evaluation_opens_a_held_out_domain():
    """Nothing but evaluation.py reads ``held_out`` to open it: no other module both names it and reads a domain."""
    for path in FILES:
        text = path.read_text()
        if path.name in ("evaluation.py", "line.py", "layout.py"):
            continue
        assert not ("held_out" in text and "read_domain" in text), path


def test_importing_the_package_loads_no_heavy_library():
    import subprocess
    import sys

    code = "import sys, dgsearch.cli; print([m for m in ('torch', 'ray', 'mlflow', 'optuna') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
