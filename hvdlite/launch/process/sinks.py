"""Where bytes of a rank go: the launcher's descriptors, and the result of `hvdlite.run`."""

STDOUT = 1
STDERR = 2
RESULT = 3  # what a rank returns to `hvdlite.run`; not a descriptor of the console
