"""Anthropic's Messages API: a request becomes that of a chat, and its deltas become content blocks."""
