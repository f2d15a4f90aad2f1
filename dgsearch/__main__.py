"""``python -m dgsearch``: the command line."""

from dgsearch.cli import main

if __name__ == "__main__":
    main()
