"""The launcher's side of elastic training: which hosts there are, and who makes up an epoch.

`discovery` says which hosts there are. `policies.elastic` decides what the launcher does.

`registrar` serves the connections (`peer`) of the workers' membership threads, and keeps the time.
What it sees, it tells `membership`, a state machine without a clock, a socket or a thread: it
answers with `actions`: messages to workers, and events for the launcher. `epochs` has its state, of
workers (`roster`) and of what happened since the last epoch (`record`), and all decisions that
follow from the state. Three judgements are parts of their own: whom to evict when links break
(`suspicions`), who comes and goes at a boundary (`growth`), and when to give up (`patience`).
`waits` tells the user for whom the job waits, and `messages` checks what workers send.
"""
