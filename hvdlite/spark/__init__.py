"""Train on Spark: `hvdlite.spark.run` calls a function on ranks that Spark's tasks start.

`driver` checks what Spark can do, and runs one barrier stage with a task for each rank. The `task`
agrees with the others where they are, starts the rank as a process of its own, and watches it. What
became of the rank is the task's result, also after a failure: for Spark, all tasks succeed. So
Spark does not run the stage again in silence, and the driver raises what the first failing rank
raised.
"""

from hvdlite.spark.driver import run

__all__ = ["run"]
