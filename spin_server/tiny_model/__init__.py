"""A tiny model of DeepSeek-V4's architecture with seeded random weights.

It runs every part that a real one runs (sliding-window, CSA and HCA layers, the indexer, mixture
of experts, hyper-connections) in 15 MB. Its text is gibberish; its timing and its block
selection are real. Knows nothing of vLLM.
"""
