import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from toy import fill, make_study

from dgsearch.study import Study
from dgsearch.tracking.store import connect


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite store with nothing in it: to make one takes MLflow seconds."""
    file = tmp_path_factory.mktemp("store") / "mlflow.db"
    connect(f"sqlite:///{file}")
    return file


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_store: Path) -> Study:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    study = make_study(tmp_path / "my study #1")
    fill(study)
    shutil.copy(empty_store, study.path)
    return study
