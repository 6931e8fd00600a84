"""Load examples from the hub, a folder or a package; split them into train, test, partitions."""
