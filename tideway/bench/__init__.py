"""`tideway bench`: seeded load on any OpenAI-compatible server, and what came of it.

arrivals, lengths, traces, workload   what is asked for when: pure functions of a specification and a seed
prompts, client, runner               sends it over HTTP and times the answers
records, summary, plots               the figures; they need no HTTP, an in-process benchmark makes records itself
"""
