"""Start a run, and prepare a deployment: credentials and checks of its machines."""
