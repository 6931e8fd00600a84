"""A Trainer script, and the Flower app that it becomes."""
