"""Reports of runs; evaluation, prediction and export with a run's result."""
