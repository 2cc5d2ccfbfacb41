"""What a job shows: the lines of its ranks, and the report of what failed first."""
