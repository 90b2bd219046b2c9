"""Vectors of texts, and which of them is nearest to a question. Needs a model that embeds:
make up ARGS="--model embed=Qwen/Qwen3-Embedding-0.6B"."""

import os
import sys

import httpx
from openai import OpenAI

URL = os.environ.get("TIDEWAY_URL", "http://127.0.0.1:8000")
KEY = os.environ.get("TIDEWAY_API_KEY", "none")
client = OpenAI(base_url=f"{URL}/v1", api_key=KEY)
model = sys.argv[1] if len(sys.argv) > 1 else "embed"

texts = ["A compiler translates programs.", "Bread is baked in an oven.", "An interpreter runs programs line by line."]
vectors = client.embeddings.create(model=model, input=texts)
print(
    len(vectors.data),
    "vectors of",
    len(vectors.data[0].embedding),
    "dimensions,",
    vectors.usage.prompt_tokens,
    "tokens",
)

asked = {"model": model, "query": "What is a compiler?", "documents": texts}
ranked = httpx.post(f"{URL}/v1/rerank", json=asked, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
ranked.raise_for_status()
for result in ranked.json()["results"]:
    print(f"{result['relevance_score']:.3f}", result["document"]["text"])
