"""hvdlite-run: starts the ranks of a job, shows their output, and ends them together.

The way of one job: `cli` reads the command line (`flags`, `config_file`), or `api` a call; `job`
numbers the ranks over the hosts (`hosts`, `placement`); `local` starts those of this host (each
through `shim`, watched by `guardian`), `remote` has an `agent` start those of others over ssh. Then
`supervisor` runs the `loop` in which `output` moves the ranks' lines to the console, and `report`
picks the failure to show. `doctor` says what works here.
"""
