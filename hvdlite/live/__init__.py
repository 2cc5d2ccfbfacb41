"""What a running job does, for people who watch it: who is slow, and why.

`sample` is what a rank says once a second, `run` what is known of a job from all samples.
"""
