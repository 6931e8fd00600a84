"""For researchers' machines: studies and tuning. No app imports it."""
