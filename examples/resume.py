"""A stream that is read to its end over as many connections, and gateways, as it takes: this one hangs up by itself after
its first chunk and goes on where it was. `TIDEWAY_URL` may name several gateways, separated by commas."""

import itertools
import os
import sys
import time
import uuid

import httpx
import openai

URLS = os.environ.get("TIDEWAY_URL", "http://127.0.0.1:8000").split(",")
API_KEY = os.environ.get("TIDEWAY_API_KEY", "none")
NUM_HANG_UPS = 2
"""Connections that end after a chunk."""
MAX_FAILURES = 10
PAUSE_S = 0.5

clients = itertools.cycle([openai.OpenAI(base_url=f"{url}/v1", api_key=API_KEY) for url in URLS])
model = sys.argv[1] if len(sys.argv) > 1 else next(clients).models.list().data[0].id
key = str(uuid.uuid4())
text, event_id, num_connections, num_failures, is_over = "", "", 0, 0, False
while not is_over:
    try:
        stream = next(clients).chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "What is a compiler?"}],
            max_tokens=100,
            temperature=0,
            stream=True,
            # The same call each time: the key says which answer it is of, the id what we have of it.
            extra_headers={"Idempotency-Key": key, "Last-Event-ID": event_id},
        )
        num_connections += 1
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            event_id = chunk.event_id
            is_over = chunk.choices[0].finish_reason is not None
            if is_over or num_connections <= NUM_HANG_UPS:
                break
        stream.close()
    except (openai.APIError, httpx.TransportError) as error:
        status = getattr(error, "status_code", 503)
        num_failures += 1
        if status < 500 or num_failures > MAX_FAILURES:
            raise
        time.sleep(PAUSE_S)
print(f"{num_connections} connections: {text!r}")
