"""`python -m ravan_flwr` is `ravan-flwr`."""

from ravan_flwr.cli import main

if __name__ == "__main__":
    main()
