"""Which rank a launcher has made of this process, by the variables that it sets."""
