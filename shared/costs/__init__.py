"""Cost models: how long a step takes from what is in it, fitted to profiles or learnt from the steps that run.

Called by the engine, the scheduler, placement and simulation. Pure: it measures nothing itself.
"""
