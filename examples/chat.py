"""OpenAI's client: a whole answer, and a stream."""

import os
import sys

from openai import OpenAI

URL = os.environ.get("TIDEWAY_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("TIDEWAY_API_KEY", "none"))
model = sys.argv[1] if len(sys.argv) > 1 else client.models.list().data[0].id
messages = [{"role": "user", "content": "What is a compiler?"}]

whole = client.chat.completions.create(model=model, messages=messages, max_tokens=40, temperature=0)
print(f"whole: {whole.choices[0].message.content!r} ({whole.usage.completion_tokens} tokens)")

stream = client.chat.completions.create(model=model, messages=messages, max_tokens=40, temperature=0, stream=True)
text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
print(f"stream: {text!r}")
