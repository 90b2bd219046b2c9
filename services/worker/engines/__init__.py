"""Instances whose engine is another's: a hosted one (vLLM in an environment of its own), or a server that runs already."""
