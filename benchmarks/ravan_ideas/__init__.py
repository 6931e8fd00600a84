"""Try changes of RAVAN that are no options of the package, with the tools of a study.

    python -m benchmarks.ravan_ideas study benchmarks/ravan_ideas/study.yaml data=FOLDER --jobs 2

All commands of `ravan-flwr` are available, with two more methods. A run has one process (`--jobs`
of 2 on two cores), since the workers of a larger run would not have them.
"""
