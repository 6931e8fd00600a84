"""Try changes of RAVAN that are no options of it, with the means of a study.

    python -m benchmarks.ravan_ideas study benchmarks/ravan_ideas/study.yaml data=FOLDER --jobs 2

All commands of `ravan-flwr` are there, and two methods more. A run has one process (`--jobs` of 2
on two cores), since the workers of a larger one would not know them.
"""
