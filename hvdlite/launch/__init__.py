"""The launcher: hvdlite-run and `hvdlite.run` start the ranks of a job and end them together.

One job goes through these modules:

1. `command.cli` reads the command line (`command.flags`, `command.config_file`), or `api` takes the
   arguments of `hvdlite.run`. Both make a `description.Description`.
2. `job` chooses the kind of job. `run` reaches the other hosts (`remote.agents`), and serves what
   the ranks meet by: the store (`hvdlite.rendezvous.store`) or the registrar (`elastic`).
3. `process.local` starts the ranks of this host, each through `process.shim`, so that they die with
   the launcher. For every other host `remote.host` opens a channel (`remote.channels`) to an
   `agent` there, which a remote launcher such as `remote.ssh` starts. The agent starts that host's
   ranks, and the two exchange `remote.messages`.
4. `supervisor` runs the `loop` of this host until nothing of the job is left; one of the `policies`
   decides what follows from the end of a rank. `output` cuts what the ranks write into lines,
   `console` writes these, and `report` chooses the failure to show. The agent runs the same loop
   over its ranks; to the supervisor, a rank of another host looks like a local one.

`call` is the program of the ranks of `hvdlite.run`, `command.doctor` the one behind --doctor.
"""
