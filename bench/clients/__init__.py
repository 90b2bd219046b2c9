"""SDKs and agent frameworks against a Tideway that runs: see `__main__`."""
