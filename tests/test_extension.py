"""Adding a method is one file: dropped into a copy of the package, it passes the laws with no other change."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_readmes_vrex_is_found_searched_and_lawful(tmp_path):
    readme = (ROOT / "README.md").read_text()
    block = re.search(r'    """Risk extrapolation.*?(?=\n\n?Then)', readme, re.S).group()
    code = "\n".join(line.removeprefix("    ") for line in block.splitlines()) + "\n"
    assert len([line for line in code.splitlines() if line.strip()]) <= 25
    for name in ("dgsearch", "tests", "search_spaces"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "dgsearch" / "objectives" / "vrex.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "DGSEARCH_LAWS_EXEMPT": "vrex"}

    def run(*arguments):
        return subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
        )

    done = run("-m", "pytest", "-q", "-k", "vrex", "tests/test_laws.py")
    assert done.returncode == 0, done.stdout[-3000:]
    passed = int(re.search(r"(\d+) passed", done.stdout).group(1))
    assert passed >= 8, done.stdout  # laws 1, 2, 4, 5 (twice or more), 6, 9
    shown = run("-m", "dgsearch", "methods", "vrex", "--json")
    assert '"0.1 … 100000 log"' in shown.stdout
    unlisted = run("-c", "import dgsearch; print(dgsearch.__file__)")
    assert str(tmp_path) in unlisted.stdout
