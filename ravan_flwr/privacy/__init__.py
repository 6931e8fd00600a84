"""Compute differentially private releases of a round: clip, sum, add noise, account for privacy.

Pure mathematics: no module here uses Flower, messages or files. The proof is in
docs/appendix/privacy-proofs.md.
"""
