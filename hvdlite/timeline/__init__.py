"""The timeline's files: each rank writes a part, and the parts become one file (`recorder`).

The engine tells csrc/trace what it does (csrc/engine/timeline.h), data planes add the parts of a
batch, and events on a GPU tell when it worked (csrc/gpu/device_trace.h). A thread of
csrc/trace writes a rank's events to the rank's part of the file (csrc/trace/event_file.h). Here the
parts of all ranks are merged on one clock, by offsets that `hvdlite.rendezvous.connection`
measured. docs/timeline.md explains how to read the result.
"""
