"""The kinds of jobs: what a `supervisor.Policy` decides, and how such a job is run.

`fixed` is the policy of a job whose ranks stay; `elastic` that of one whose workers die, leave and
join; `restarting` that of one with parameter servers, whose workers start again. A `fleet` says
which worker has which place, and which one to start next. `elastic_run` and `servers_run` have the
parts of `run.Run` that differ.
"""
