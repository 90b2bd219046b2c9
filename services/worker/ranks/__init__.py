"""The ranks of an instance's device group: one process each."""
