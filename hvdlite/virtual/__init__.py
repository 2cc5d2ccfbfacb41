"""Virtual ranks: a fixed number of them is carried by any number of ranks, with the same result."""
