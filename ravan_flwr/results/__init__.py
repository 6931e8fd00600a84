"""A run's result put to use: evaluation, prediction, export, and pages of charts."""
