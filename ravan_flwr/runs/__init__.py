"""Run directories, with records and checkpoints; console output and tracking of a run."""
