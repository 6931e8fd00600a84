"""Run the server of a federation: recruit nodes, hold rounds, check replies and sum them."""
