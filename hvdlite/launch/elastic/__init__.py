"""The launcher's side of elastic training: which hosts there are, and who makes up an epoch.

`discovery` says which hosts there are. `job` has what the launcher does.

`registrar` serves the connections (`peer`) of the workers' membership threads, and keeps the time.
What it sees, it tells `membership`, a state machine without a clock, a socket or a thread: it
answers with actions (`messages`, which also checks what workers send): messages to workers, and
events for the launcher. Its state is in `state`: the workers, what happened since the last epoch,
and for whom the job waits. `verdicts` has three judgements: whom to evict when links break, who
comes and goes at a boundary, and when to give up.
"""
