"""One page for a run under way, a finished run and several runs; what a run made, put to use."""

PORT = 8642  # of the dashboard: neither Flower's nor TensorBoard's
