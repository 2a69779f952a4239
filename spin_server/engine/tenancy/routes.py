"""Which routes of the server a tenant may use; all others are denied, whatever vLLM adds.

A route is served if everything it does goes through the engine client's `generate` or `encode`, or
stays within the request. Denied are the ones that name other requests (stored responses, aborts),
change the server, or tell about it.
"""

FREE = frozenset(
    {
        ("GET", "/health"),
        ("GET", "/ping"),
        ("POST", "/ping"),
        ("GET", "/metrics"),
        ("GET", "/metrics/"),
    }
)
SERVED = frozenset(
    {
        ("GET", "/v1/models"),
        ("POST", "/detokenize"),
        ("POST", "/invocations"),
        ("POST", "/tokenize"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/chat/completions/batch"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/v1/responses"),
    }
)
# Answered by the server itself, before any limit of the engine's.
TOKEN_COUNTS = frozenset(
    {
        ("POST", "/detokenize"),
        ("POST", "/tokenize"),
        ("POST", "/v1/messages/count_tokens"),
    }
)
