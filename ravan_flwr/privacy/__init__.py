"""Make what a round releases private: clip, sum, add noise, and account for it.

Pure mathematics: no file here knows of Flower, of messages or of files. docs/privacy.md has the
proof.
"""
