"""The launcher's side of elastic training: which workers make up the world of each epoch.

`registrar` serves the connections of the workers' stewards, and keeps the time. What it sees, it
tells `membership`, a state machine without a clock, a socket or a thread, which answers with
`actions`: messages to workers, and events for the launcher. The state machine keeps what it knows
of each worker in a `roster`, and leaves three judgements to parts of their own: whom to evict when
links break (`accusations`), who comes and goes at a boundary (`growth`), and when to give up
(`patience`). `messages` checks what workers send.
"""
