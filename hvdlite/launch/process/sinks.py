"""The sinks of a rank's bytes: the console, the result of `hvdlite.run`, and a view of the job."""

STDOUT = 1  # STDOUT and STDERR are also descriptors of the launcher.
STDERR = 2
RESULT = 3  # This one and the next one are not descriptors.
LIVE = 4  # samples of the rank for a view of the job; see `hvdlite.launch.view`
