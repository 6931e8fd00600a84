"""Run directories: records, checkpoints, and what a person sees meanwhile."""
