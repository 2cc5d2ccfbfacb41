"""The launcher's side of elastic training: which hosts there are, and who makes up an epoch.

`discovery` says which hosts there are. `job` has what the launcher does.

`registrar` serves the connections of the workers' membership threads, and keeps the time. What it
sees, it tells `membership`, a state machine without a clock, a socket or a thread: it answers with
actions (`messages`): messages to workers, and events for the launcher. Its state is in `state`: the
workers, and what happened since the last epoch. `verdicts` has three judgements: when to call
members to a boundary, whom to evict when links break, and when to give up.
"""
