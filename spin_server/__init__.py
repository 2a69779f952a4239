"""spin-server: vLLM with SPIN, the Shadow Predictive Indexer, in front of its sparse indexer."""

__version__ = "0.1.0"
