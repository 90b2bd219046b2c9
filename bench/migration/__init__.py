"""What a migration costs the request that moves, those that stay, and the wire (Llumnix section 6.2).

python -m bench.migration [pause] [neighbours] [baselines] [transfer] [--device cuda] [--output bench/results]
"""
