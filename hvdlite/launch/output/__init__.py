"""The output of a job: the lines of its ranks, and the report of the failure that ended it."""
