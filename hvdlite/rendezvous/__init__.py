"""Start-up: the ranks of a job find, authenticate and connect to each other.

The way of one start is this: `launchers` and `environment` read this rank's numbers and the address
of the store from its launcher's variables. If there are none, `launchers.unsupported` refuses to
train alone where a variable speaks of other processes. Programs that start functions make the
numbers by `assignments`, and set no variable. `serving` starts the store in rank 0 if the launcher
does not. `store` lets the ranks exchange their endpoints: an `endpoint` is the listeners of a
process and what others need to know of it. `connect` then builds the `connection` that the
C++ engine uses, by way of the `mesh`. `topology` numbers the hosts, and `clock` compares their
clocks. Every connection begins with a `handshake`; `dial` dials, and `acceptor` accepts. One
`deadline` limits the whole start.
`forked` keeps descriptors out of forked children.

The store is a `service`: a thread that serves the connections of authenticated peers (`peer`),
which send JSON messages. In an elastic job another service takes its place, the registrar of
hvdlite-run: `registrar_client` is a worker's connection to it.
"""
