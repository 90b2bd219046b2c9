"""Step plans on a device: rows of sequences, sampling, grammars, safepoints, profiles of steps.

Called by the engine's loop of an instance, one step at a time. Knows no bus, no client and no other instance.
"""
