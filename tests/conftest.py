"""Without a GPU, our Triton kernels run in Triton's interpreter."""

import os

import torch

if not torch.cuda.is_available():
    # Read when triton is imported, by whichever test comes first.
    os.environ["TRITON_INTERPRET"] = "1"
