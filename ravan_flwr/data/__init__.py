"""Examples: from the hub, a folder or a package; split into train, test and partitions."""
