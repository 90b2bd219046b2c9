"""OpenAI's Responses API: a request becomes that of a chat, and its deltas become items."""
