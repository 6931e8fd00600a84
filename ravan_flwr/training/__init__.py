"""The network, its adapters, and local training on one machine."""
