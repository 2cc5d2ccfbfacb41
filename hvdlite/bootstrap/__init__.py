"""Start-up: the ranks of a job find, authenticate and connect to each other.

The way of one start is this: `launchers` and `environment` read this rank's numbers and the address
of the store from its launcher's variables. `store` lets the ranks exchange their addresses, and
`connect` builds the connections that the C++ engine then uses. `topology` numbers the hosts, and
`clock` compares their clocks. Every connection begins with a `handshake`; `introduction` dials, and
`acceptor` accepts. One `deadline` limits the whole start.
"""
