"""Virtual ranks for loops over `hvd.virtual_steps`."""
