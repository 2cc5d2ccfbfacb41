"""The timeline: recording a session on each rank, and merging the parts into one file."""
