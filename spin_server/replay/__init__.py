"""Offline study of recorded indexer scores.

`trace` reads what was recorded, `runner` replays SPIN over it, `report` sums up. Knows nothing of
vLLM.
"""
