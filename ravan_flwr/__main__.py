"""Run the command `ravan-flwr` by `python -m ravan_flwr`."""

from ravan_flwr.cli import main

if __name__ == "__main__":
    main()
