"""Build the network, adapt it, and train it locally on one machine."""
