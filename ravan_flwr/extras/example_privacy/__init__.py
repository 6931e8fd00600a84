"""Differential privacy of single examples (`privacy=example`): each client trains with DP-SGD.

A device accounts for a round before it trains, and refuses above its epsilon (client.py,
account.py). Its steps clip the gradients of a Poisson sample and add noise (steps.py,
gradients.py); rules.py has the gradients of each layer. The server's release asks the clients that
are within epsilon (release.py). docs/privacy.md describes what is protected.
"""
