"""The admin layer: policies, tenants and keys, changed while the server runs.

A store keeps the documents and every change of them; `Administration` is the only one that writes
to it; the HTTP application and the command line speak to `Administration`; the applier brings the
engine to the store's revision. Knows neither torch nor vLLM: the engine is reached through
`EngineLink`.
"""
