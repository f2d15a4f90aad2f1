"""What a trial prints, warns and raises is in its log, and on no screen."""

import ctypes
import logging
import os
import sys
import warnings

import pytest
from toy_search import Toy, make_space, make_study

from dgsearch.search.engine import Assignment, Engine, Outcome
from dgsearch.search.local import run_local
from dgsearch.search.worker_log import logged
from dgsearch.train import StopTrial


def assignment(folder) -> Assignment:
    return Assignment(0, 0, {}, (), str(folder))


@pytest.mark.filterwarnings("always")
def test_all_a_trial_says_goes_to_its_log(tmp_path, capfd):
    def trial(assignment, report):
        print("printed")
        print("complained", file=sys.stderr)
        warnings.warn("warned", stacklevel=1)
        logging.getLogger("some.library").warning("logged")
        return Outcome("complete")

    before = sys.stdout, sys.stderr, list(logging.getLogger().handlers)
    # pytest keeps warnings for itself: here they go where they go outside of it.
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(warnings, "showwarning", lambda message, *_: print(message, file=sys.stderr))
        assert logged(trial, whole_process=False)(assignment(tmp_path), None) == Outcome("complete")
    assert (sys.stdout, sys.stderr, list(logging.getLogger().handlers)) == before
    text = (tmp_path / "worker.log").read_text()
    assert all(text.count(word) == 1 for word in ("printed", "complained", "warned", "logged"))
    assert capfd.readouterr() == ("", "")


def test_in_a_process_of_its_own_so_does_what_libraries_write_past_python(tmp_path, capfd):
    def trial(assignment, report):
        print("printed")
        os.write(1, b"past python\n")
        os.write(2, b"past it too\n")
        ctypes.CDLL(None).puts(b"of the C library")
        return Outcome("complete")

    logged(trial, whole_process=True)(assignment(tmp_path), None)
    text = (tmp_path / "worker.log").read_text()
    assert all(words in text for words in ("printed", "past python", "past it too", "of the C library"))
    os.write(1, b"mine again\n")
    assert capfd.readouterr() == ("mine again\n", "")


def test_a_failure_is_there_in_full_and_silence_leaves_nothing(tmp_path):
    study = make_study(tmp_path / "s")
    run_local(Engine(study, make_space(), trials=4), Toy(fails=(1,)))
    (log,) = study.path.glob("folds/0/trials/*/*/worker.log")
    assert log.parent.parent.name == "0001"
    text = log.read_text()
    assert text.startswith("Traceback") and text.endswith("RuntimeError: no such thing\n") and "toy_search.py" in text


@pytest.mark.parametrize("raised", [StopTrial, KeyboardInterrupt, SystemExit])
def test_being_stopped_is_no_failure(raised, tmp_path):
    def trial(assignment, report):
        raise raised

    with pytest.raises(raised):
        logged(trial, whole_process=True)(assignment(tmp_path), None)
    assert not (tmp_path / "worker.log").exists()
