"""HTTP below any API: limits of connections, bodies within their bounds, allowed origins, errors in OpenAI's shape.

Called by the routes of every API and by the server itself. Knows nothing of models, prompts or streams.
"""
