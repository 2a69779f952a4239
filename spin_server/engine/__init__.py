"""Everything that touches vLLM.

`versions`, `model_support` and `preflight` refuse early what cannot be served; `server` runs
vLLM's OpenAI server; `presence` and `worker` let it verify that our plugins are active in every
process; `cpu` makes vLLM's CPU build serve DeepSeek-V4.
"""
