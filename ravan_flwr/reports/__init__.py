"""Reports and the dashboard of runs; evaluation, prediction and export with a run's result."""

PORT = 8642  # of the dashboard: neither Flower's nor TensorBoard's
