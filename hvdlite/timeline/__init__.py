"""The timeline's files: each rank writes a part, and the parts become one file (`recorder`).

docs/timeline.md explains how to read the result.
"""
