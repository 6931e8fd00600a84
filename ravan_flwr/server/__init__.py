"""The server of a federation: recruit nodes, run rounds, check replies and sum them."""
