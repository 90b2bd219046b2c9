"""The order of requests of two models that share one instance: SeaLLM's doubling budget against other orders.

`python -m bench.ordering` runs the real engine in virtual time: steps take what a cost model says.
"""
