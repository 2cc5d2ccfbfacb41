"""What a running job does, for people who watch it: who is slow, and why.

In a rank, `observed` takes what the script tells, and `reporter` says once a second a `sample`. In
the launcher, `run` is what is known of a job from all samples, `findings` what limits it, in words;
`screen` and `report` show both.
"""
