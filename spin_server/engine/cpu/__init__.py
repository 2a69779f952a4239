"""What makes vLLM's CPU build serve DeepSeek-V4; nothing of SPIN itself.

`plugin` installs it in every vLLM process, `metadata_kernels` replaces Triton kernels that need
a GPU, `prefill_scoring` scores long prompts faster.
"""
