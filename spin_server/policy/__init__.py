"""What a request's policy is, and its limits.

Knows neither torch nor vLLM.
"""
