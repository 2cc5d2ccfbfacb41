"""The sinks of a rank's bytes: the console's stdout and stderr, and the result of `hvdlite.run`."""

STDOUT = 1  # STDOUT and STDERR are also descriptors of the launcher.
STDERR = 2
RESULT = 3  # This one is not a descriptor.
