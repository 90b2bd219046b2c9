"""ConServe's section 6 at the scale of one machine: online and offline requests on one engine, against an engine that
serves online requests alone and against one that only prioritises them.

    python -m bench.coserving [trace onoff burst rate ablation safepoints] [--short]
"""
