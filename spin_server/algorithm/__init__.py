"""SPIN itself, in plain torch, batched over requests and draft rows.

Read in this order: `options` (what can be chosen), `budget`, `exploration`, `state`, `step` (a
decode step from end to end), `miss` (what it costs). Each numeric operation lives in
`spin_kernels`. Knows nothing of vLLM, files or time.
"""
