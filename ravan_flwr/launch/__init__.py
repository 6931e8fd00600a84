"""Start a run, and prepare what has to be there before."""
