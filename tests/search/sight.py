"""What a node of a test sees; in a file of its own, so that asking it imports nothing else."""

import os


def look(sources):
    """See everything, but on a node that was started with BLIND set."""
    if "BLIND" in os.environ:
        raise FileNotFoundError(2, "No such file or directory", "/data/of/this/test")
