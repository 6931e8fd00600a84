"""A Flower app of its own, which uses RAVAN as a library."""
