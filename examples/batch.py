"""A file of prompts in, a file of answers out: each line is answered once, beside whatever else runs."""

import json
import os
import sys
import time

from openai import OpenAI

URL = os.environ.get("TIDEWAY_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("TIDEWAY_API_KEY", "none"))
model = sys.argv[1] if len(sys.argv) > 1 else client.models.list().data[0].id

lines = [
    {
        "custom_id": f"chapter-{number}",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": model, "prompt": f"Chapter {number}:", "max_tokens": 10},
    }
    for number in range(20)
]
content = "\n".join(json.dumps(line) for line in lines).encode()
file = client.files.create(file=("chapters.jsonl", content), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.2)
    batch = client.batches.retrieve(batch.id)
if batch.output_file_id is None:
    sys.exit(f"{batch.status}: {batch.errors}")
for line in client.files.content(batch.output_file_id).text.splitlines():
    answer = json.loads(line)
    print(answer["custom_id"], repr(answer["response"]["body"]["choices"][0]["text"]))
