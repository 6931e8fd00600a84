"""Keep run directories: records, checkpoints; show a person what happens meanwhile."""
