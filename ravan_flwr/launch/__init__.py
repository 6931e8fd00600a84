"""Ways to start a run, and what has to be there before."""
