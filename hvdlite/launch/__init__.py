"""The launcher: hvdlite-run and `hvdlite.run` start the ranks of a job and end them together.

One job goes through these modules:

1. `cli` reads the command line (`flags`), or `api` takes the arguments of `hvdlite.run`. Both make
   a `description.Description`. `doctor` is --doctor, `node` this node's part of a job in node mode.
2. `run` chooses the kind of job: `job`, `servers` or `elastic.job`. The job reaches the other hosts
   (`agents`), and serves what the ranks meet by: the store (`hvdlite.rendezvous.store`) or the
   registrar (`elastic`).
3. `process` starts the ranks of this host (`hosts` places them), each through `shim`, so that they
   die with the launcher. For every other host `agents` opens one of the `channels` to an `agent`
   there, which a remote launcher such as ssh starts. The agent starts that host's ranks, and the
   two exchange `messages`.
4. `supervisor` runs the `loop` of this host until nothing of the job is left; the policy of its
   kind decides what follows from the end of a rank, and `slots` which worker starts again, and
   where. `output` and `console` show what the ranks write, and `report` chooses the failure to
   show. The agent runs the same loop over its ranks; to the supervisor, a rank of another host
   looks like a local one.

`call` is the program of the ranks of `hvdlite.run`.
"""
