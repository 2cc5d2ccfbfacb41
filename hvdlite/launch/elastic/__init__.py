"""The launcher's side of elastic training: where workers run, and which of them make up an epoch.

`job` starts an elastic job. `discovery` says which hosts there are, `fleet` which worker to start
where and when, and `supervisor` runs the launcher's loop over them (`stopped` finds workers that
were stopped by a signal).

`registrar` serves the connections (`peer`) of the workers' membership threads, and keeps the time.
What it sees, it tells `membership`, a state machine without a clock, a socket or a thread: it
answers with `actions`: messages to workers, and events for the launcher. `epochs` has its state, of
workers (`roster`) and of what happened since the last epoch (`record`), and all decisions that
follow from the state. Three judgements are parts of their own: whom to evict when links break
(`suspicions`), who comes and goes at a boundary (`growth`), and when to give up (`patience`).
`waits` tells the user for whom the job waits, and `messages` checks what workers send.
"""
