"""A Flower app whose clients train by trl's SFTTrainer."""
