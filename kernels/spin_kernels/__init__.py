"""SPIN's operations, one folder each: a plain torch reference, and a Triton kernel beside it.

A reference is the meaning of its operation. It imports torch only, so this package works
where Triton is absent. Rows are decode queries; a row reads and writes the history of one
request and layer through `state_rows`, so several rows may share one state.

Knows nothing of vLLM, policies or requests.
"""
