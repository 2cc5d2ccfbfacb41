"""hvdlite-run: starts the ranks of a job, shows their output, and ends them together.

The way of one job: `cli` reads the command line, `placement` numbers the ranks, `local` starts them
(each through `shim`, watched by `guardian`), `supervisor` runs the loop in which `output` moves
their lines to the console and `report` picks the failure to show. `doctor` says what works here.
"""
