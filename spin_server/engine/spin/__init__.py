"""SPIN inside the engine.

`requests` decides whose history a decode row continues, `policy_table` holds the numbers that
each request runs with, `layer` plans and learns for one layer; none of these three knows vLLM.
`v1_runner` and `indexer` connect them to vLLM's V1 runner and its indexer; `plugin` installs both.
"""
