"""``python -m ligermodels``: the same as the console script ``ligermodels``."""

from ligermodels.cli import main

main()
