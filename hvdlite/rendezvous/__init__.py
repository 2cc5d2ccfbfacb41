"""Start-up: the ranks of a job find, authenticate and connect to each other.

The way of one start is this: `launchers` and `environment` read this rank's numbers and the address
of the store from its launcher's variables, or refuse to train alone. Programs that start functions
make the numbers by `assignments`, and set no variable. By the `store`, which rank 0 serves if the
launcher does not, the ranks exchange the descriptions of their endpoints. The `mesh` then connects
them, with `local_peers` on one host, and returns the `connection` that the C++ engine uses. Every
connection begins with a `handshake`; `client` dials, and a `service` accepts. One `deadline` limits
the whole start. `descriptors` keeps what is open out of forked children.

In an elastic job the registrar of hvdlite-run takes the store's place. The thread of `membership`
talks to it, and takes this worker from one world to the next; `epochs` has these worlds.
"""
