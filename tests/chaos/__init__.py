"""Kill everything, at random, for real: see `python -m tests.chaos --help`."""
