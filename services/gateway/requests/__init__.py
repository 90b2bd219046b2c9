"""A request from arrival to last byte: authenticate, read, tokenise, place, answer, resume after a lost connection.

Called by the table of routes; the Messages and Responses APIs and batches answer through it. It hands sequences to
`streams` and does not know where they run.
"""
