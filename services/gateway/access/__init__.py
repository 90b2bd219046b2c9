"""API keys and limits: who may use the gateway, and how much, here and over all gateways.

Called once before a request is tokenised and once when it ends. Knows counts and tokens, not what was asked.
"""
