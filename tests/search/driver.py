"""A driver to kill: searches a study of toys on Ray. python driver.py STUDY --trials 4 --address HOST:PORT"""

import argparse
import sys
from pathlib import Path

from cluster_toy import Sleeper
from sight import look
from test_engine import make_space, make_study

from dgsearch.search.engine import Engine
from dgsearch.search.ray_tune import run_ray


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("study", type=Path)
    parser.add_argument("--trials", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--gpus", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--gate", type=Path)
    given = parser.parse_args()
    space = make_space()
    study = make_study(given.study, space)
    with study.driven():
        engine = Engine(study, space, trials=given.trials)
        if engine.left == 0:
            return 0
        try:
            run_ray(
                engine,
                Sleeper(given.seconds, given.gate),
                address=given.address,
                cpus_per_trial=0.5,
                gpus_per_trial=given.gpus,
                look=look,
                say=lambda text: print(text, flush=True),
            )
        except ValueError as error:
            print(f"error: {error}", flush=True)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
